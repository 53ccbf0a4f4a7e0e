"""Takes the steps of an optimizer: from the gradients in ``.grad`` to new weights, by its schedule.

Wrappers are made from an optimizer's class or share its ``__dict__`` ([Note: One end] in runtime),
so what takes steps is an object that they share, and autograd's hooks lead to it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError, PoisonedError, StowError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.base.sizes import format_count
from tensorstow.base.tiers import Tier
from tensorstow.checkpoint.commits import Commits
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.checkpoint.run import Extra
from tensorstow.optim import one_optimizer
from tensorstow.states.layout import OptionalStates
from tensorstow.states.native_pipeline import StepRow, can_update, poisoning
from tensorstow.states.state_store import StateStore
from tensorstow.step import validation
from tensorstow.step.backward_overlap import BackwardOverlap
from tensorstow.step.call_lock import CallLock, exclusive_call
from tensorstow.step.legal_calls import Phase, PublicCall, refuse
from tensorstow.step.managed_param import ManagedParam, ParamUpdate, StepPlan
from tensorstow.step.param_table import ParamTable
from tensorstow.step.repeated_steps import RepeatedSteps
from tensorstow.step.replaced import ModuleParameters
from tensorstow.step.schedule import Schedule, Synchronous
from tensorstow.step.speculative_overlap import SpeculativeOverlap
from tensorstow.step.step_plan import Groups, States, must_seed, name_of, scalar_table, step_of
from tensorstow.step.unscaling import is_skipped, unscale, unscaled
from tensorstow.tensors.dtensor import (
    gradient_and_event,
    gradient_in_order,
    gradient_of,
    in_order,
    order_of,
    shard_of,
)
from tensorstow.tensors.placeholder import ConsumedGradient, refuse_used

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: spreads consecutive numbers


class ParamFilter:
    """Selects the parameters whose states the optimizer keeps: all of them.

    Subclasses keep those of fewer, and update the other parameters themselves.
    """

    def manages(self, parameter: torch.Tensor) -> bool:
        """Return whether the states of ``parameter`` are the optimizer's to keep."""
        del parameter
        return True

    def update_others(self, groups: Groups, states: States, factor: float) -> None:
        """Update the parameters that are not managed, by their gradients times ``factor``."""


class ClipFactor:
    """The factor of clipping that the next step applies to its gradients."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._clipped: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()

    def set(self, factor: float, clipped: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Multiply by ``factor`` from now on; ``clipped``: parameters and the gradients meant."""
        self._factor, self._clipped = factor, clipped

    def clear(self) -> None:
        """Multiply by 1: the gradients are used, or dropped."""
        self.set(1.0, ())

    def of_now(self) -> float:
        """Return the clip factor of the current gradients: 1 if all clipped ones were replaced.

        Raises OptionError if only some of them were.
        """
        still = [_is_still(p.grad, gradient) for p, gradient in self._clipped]
        if all(still) or self._factor == 1.0:
            return self._factor
        if any(still):
            message = (
                f"{still.count(False)} of {len(still)} gradients were dropped or replaced between"
                " clip_grad_norm_ and step(): the others would be clipped by a norm that counts"
                " them. Clip after the last change to a gradient."
            )
            raise OptionError(message)
        return 1.0


def _is_still(gradient: torch.Tensor | None, clipped: torch.Tensor) -> bool:
    """Return whether a gradient is the one that was clipped, which may have been given back."""
    is_returned = isinstance(clipped, ConsumedGradient) and clipped.returned is gradient
    return gradient is clipped or (is_returned and gradient is not None)


class ScaledLoss:
    """The loss scale of the current step, if the caller has scaled the loss."""

    def __init__(self) -> None:
        self.factor = 1.0
        self.overflowed = False

    @contextmanager
    def by(self, factor: float, *, overflowed: bool) -> Iterator[None]:
        """Divide gradients by ``factor`` inside the block, or skip the step if ``overflowed``."""
        self.factor, self.overflowed = factor, overflowed
        try:
            yield
        finally:
            self.factor, self.overflowed = 1.0, False


class OptimizerContents:
    """The parameter groups and states of an optimizer, as it has them now."""

    def __init__(self) -> None:
        self.optimizer: Callable[[], object] = lambda: None
        """A weak reference to the optimizer itself, which wrappers of its class are not."""
        self._groups: Groups = []
        self._states: States = {}

    def set(self, groups: Groups, states: States) -> None:
        """Use ``groups`` and ``states``, but those of the optimizer while it is alive."""
        self._groups, self._states = groups, states

    @property
    def groups(self) -> Groups:
        """The parameter groups."""
        self._look()
        return self._groups

    @property
    def states(self) -> States:
        """``optimizer.state``."""
        self._look()
        return self._states

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return the parameters of all groups, in order."""
        return (p for group in self.groups for p in group["params"])

    def _look(self) -> None:
        optimizer = self.optimizer()
        if isinstance(optimizer, Optimizer):
            # Other objects may have taken their place, as load_state_dict() makes some.
            self._groups, self._states = optimizer.param_groups, optimizer.state


class StepRunner:
    """Takes the steps of one optimizer."""

    def __init__(
        self,
        params: ParamTable,
        schedule: Schedule,
        commits: Commits,
        ranks: Ranks,
        call_lock: CallLock,
        param_filter: ParamFilter,
    ) -> None:
        """Step ``params`` by ``schedule``, and let ``commits`` have the steps that are due."""
        self._params = params
        self._schedule = schedule
        self._early = schedule if isinstance(schedule, BackwardOverlap) else None
        """The schedule, if it begins a step before ``step()``."""
        self._commits = commits
        self._ranks = ranks
        self._call_lock = call_lock
        self._param_filter = param_filter
        self.clip = ClipFactor()
        self.scaled = ScaledLoss()
        self.contents = OptimizerContents()
        self._module_parameters = ModuleParameters(commits.module)
        self.after_updates: list[Callable[[], None]] = []
        """Called in every step that updates, before it commits."""
        self._open_commits = False
        """Whether the step that is open commits."""
        self._repeated: RepeatedSteps | None = None
        """The last step, if others may repeat it."""
        self._optimizers_begun = 0
        """How many optimizers of the process had begun by then."""

    # --- between steps ---

    def attach(self, parameters: Iterable[torch.Tensor]) -> None:
        """Create states for those of ``parameters`` that have none and belong to the optimizer."""
        self.wait_idle()
        parameters = [p for p in parameters if self._param_filter.manages(p)]
        self._module_parameters.add(parameters)
        groups = self.contents.groups
        optional = {id(p): OptionalStates.of(g) for g in groups for p in g["params"]}
        self._params.attach(parameters, optional)

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return once the parameters with these ids, or all, have their new weights."""
        with self._call_lock.alone():
            self._schedule.wait(ids)

    def wait_idle(self) -> None:
        """Wait for updates and a commit under way, before states or weights are changed."""
        self.require(PublicCall.WHOLE)
        self.wait()
        self._commits.join(self._params)

    def wait_idle_or_abandon(self) -> None:
        """Wait for work under way, or undo an open step if it can be: resume() replaces it all."""
        if self._schedule.is_open:
            with suppress(StowError):  # of an undo, whose states are dropped
                self._schedule.finish()
        else:
            with suppress(PoisonedError):  # what failed was raised before: this is the way out
                self.wait_idle()
        self._commits.abandon()

    def is_alive(self) -> bool:
        """Return whether another step may be taken: nothing is closed, or has failed."""
        handle = self._params.store.pipeline.handle
        return handle.native is not None and not handle.is_poisoned

    def require(self, call: PublicCall) -> None:
        """Raise OptionError where ``call`` is not legal now ([Note: Legal calls])."""
        if self._early is not None:
            self._early.require(call)

    def commit(self, extra: Extra | None = None) -> int:
        """Make the run durable as it is; return the number of steps taken."""
        commits, params = self._commits, self._params
        if extra is not None and commits.stop is not None and commits.extra_now is None:
            message = (
                "A commit was called with extra=, and the one of stop_signals= would lack it. Pass"
                " a function as extra= to the optimizer, which each commit calls."
            )
            raise OptionError(message)
        self.wait_idle()
        commits.refuse_strange(params)
        self._module_parameters.check()
        # This commit is the one that was requested.
        commits.requested = False
        commits.capture(params)
        with self._ranks.reporting_errors(f"the commit of step {commits.step}"):
            small = commits.small_values(self.contents.groups, extra)
        commits.start(params, self.contents.groups, self.contents.states, small)
        commits.join(params)
        return commits.step

    # --- a step ---

    @exclusive_call("step")
    @torch.no_grad()
    def update(
        self, divisor: float, found_inf: torch.Tensor | None, grad_scale: torch.Tensor | None
    ) -> None:
        """Take a step by the gradients, clipped and divided by ``divisor``.

        ``found_inf`` and ``grad_scale`` are those of a GradScaler, if there is one.
        """
        self._params.store.pipeline.handle.live()  # also without any gradient
        scale = 1.0 if grad_scale is None else float(grad_scale)
        clip_factor, divisor = self.clip.of_now(), divisor * self.scaled.factor
        factor = clip_factor / divisor
        overflowed = self.scaled.overflowed
        may_skip = found_inf is not None or overflowed
        if not isinstance(self._early, SpeculativeOverlap):  # it undoes its updates
            self._schedule.check_scaling(factor / scale, may_skip=may_skip)
        if found_inf is not None:
            overflowed |= is_skipped(found_inf, list(self.contents.parameters()))
        with self._schedule.stepping():
            # Before the last commit is durable no chunk has a place for new states.
            self._commits.join(self._params)
            if isinstance(self._early, SpeculativeOverlap):
                self._early.settle(clip_factor, divisor, scale, is_skipped=overflowed)
            if overflowed:
                unscale(self.contents.parameters(), scale)
                with SignalsDeferred():
                    self._count_step()
                    self._end_step(commits=False)
            elif self._early is None:
                self._take_step(factor, scale)
            elif isinstance(self._early, SpeculativeOverlap) and not self._early.is_open:
                _refuse_used(self.contents.parameters())
                self.wait_idle()
                self._take_new_step(factor, scale)
            else:
                self._end_open_step(self._early, factor, scale)
        if self._commits.prompt:
            self._commits.join(self._params)
        stop = self._commits.stop
        is_stopping = stop is not None and stop.is_asked and stop.ends_with is None
        # Several ranks decide on a commit together, in their next step; a rank alone makes it now.
        if (self._commits.requested or is_stopping) and self._ranks.alone:
            self.commit()
            if stop is not None:
                stop.ends_with = stop.status

    def _take_step(self, factor: float, scale: float) -> None:
        groups, states = self.contents.groups, self.contents.states
        repeated, self._repeated = self._repeated, None  # an error leaves none
        gradients = 0
        # What a new step checks of other optimizers holds until another one begins.
        is_alone = self._optimizers_begun == one_optimizer.begun()
        if repeated is not None and scale == 1.0 and is_alone:
            gradients = repeated.gather(self._params, groups, states)
        if repeated is None or not gradients:
            if repeated is not None:
                repeated.end()
            updated = self._take_new_step(factor, scale)
            # What a commit compares is kept by ``ManagedParam``.
            durable = self._params.offload_policy.placement.durable
            if updated and isinstance(self._schedule, Synchronous) and not durable:
                manages = self._param_filter.manages
                self._optimizers_begun = one_optimizer.begun()
                self._repeated = RepeatedSteps.after(self._params, updated, groups, states, manages)
            return
        self._module_parameters.check_step(gradients)
        with self._ending_step(None, commits=False):  # the pipeline has what it reads and writes
            repeated.step(self._params.store.pipeline, groups, factor)
            self._param_filter.update_others(groups, states, factor)
        self._repeated = repeated

    def _take_new_step(self, factor: float, scale: float) -> list[ManagedParam]:
        """Take a step that is looked at from the start; return what it has updated."""
        params, schedule = self._params, self._schedule
        groups, manages = self.contents.groups, self._param_filter.manages
        gradients, new_params = collect(groups, params, manages)
        # Parameters unfrozen, or replaced by others, after the optimizer was made.
        if new_params:
            self.attach(new_params)
        updates = [ParamUpdate(group, params.get(p), gradient) for group, p, gradient in gradients]
        self._module_parameters.check_step(len(updates))
        if scale != 1.0:
            updates = unscaled(updates, scale)
        commits = self._begin_step()
        params.update_router.refresh(whole=commits)
        # Without updates no step of the pipeline takes the weights for the commit.
        if not updates and commits:
            self._commits.capture(params)
        states = self.contents.states
        plan = make_plan(updates, params, states, factor, commits=commits) if updates else None
        with self._ending_step(plan, commits=commits):
            if plan is not None:
                schedule.step(plan, states)
            self._param_filter.update_others(groups, states, factor / scale)
        return [update.param for update in updates]

    def _begin_step(self) -> bool:
        """Return whether the step commits."""
        optimizer = self.contents.optimizer()
        if isinstance(optimizer, Optimizer):
            one_optimizer.begin(optimizer)
        if not self._params.offload_policy.placement.durable:
            return False
        self._commits.refuse_strange(self._params)
        self._commits.check_extra()
        commits = self._commits.due()
        if commits:
            self._commits.prepare(self._params)
        return commits

    @contextmanager
    def _ending_step(self, used: object, *, commits: bool, is_open: bool = False) -> Iterator[None]:
        """Begin a step in the block, or end one that ``is_open``, and count it; poison on an error.

        No signal handler runs inside: an interrupt is raised after the block, when the step is
        whole, and what its commit holds is kept. ``used`` has the memory that the step reads and
        writes, which a step that fails halfway may still use.
        """
        pipeline = self._params.store.pipeline
        with SignalsDeferred():
            # An open step has begun before the block: any error leaves it half done.
            begun = pipeline.steps_begun - is_open
            try:
                with self._commits.reporting_errors(commits=commits):
                    yield
                    for hook in self.after_updates:
                        hook()
                    self._count_step()
            except BaseException as error:
                # An error before the step begins leaves the optimizer usable.
                if pipeline.steps_begun != begun:
                    pipeline.memory.append(used)
                    pipeline.handle.poison(error)
                raise
            self._end_step(commits=commits)

    def _count_step(self) -> None:
        self._commits.step += 1
        self.clip.clear()

    def _end_step(self, *, commits: bool) -> None:
        self._schedule.end_step()
        if self._params.offload_policy.placement.durable:
            groups, states = self.contents.groups, self.contents.states
            self._commits.end_step(self._params, groups, states, commits=commits)

    # --- during backward ---

    @torch.no_grad()
    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Process a gradient that autograd has just accumulated ([Note: Hooks] in call_lock)."""
        if self._early is not None:
            self._accept_gradient(self._early, parameter)
            return
        self._call_lock.check_awake("A backward")
        if self._schedule.beside_backward is not None:
            self._schedule.beside_backward()
        self._params.store.pipeline.prefetch()

    @exclusive_call("backward")
    def _accept_gradient(self, schedule: BackwardOverlap, parameter: torch.Tensor) -> None:
        params = self._params
        param = params.find(parameter)
        params.store.pipeline.handle.live()
        if schedule.is_given_up():
            parameter.grad = None  # of weights that no longer exist, as those that resume() drops
            return
        try:
            is_early = schedule.is_open or schedule.begins_now
            if param is not None and is_early and schedule.gradients.is_final(param.number):
                _check_gradient(param, self.contents.groups)
                if not schedule.is_open:
                    self._open_step(schedule)
                schedule.on_gradient(param)
        except BaseException:
            schedule.break_off()
            raise

    def _open_step(self, schedule: BackwardOverlap) -> None:
        params = self._params
        validation.refuse_ranks(self._commits.module, self.contents.parameters())
        self.wait_idle()

        def takes_part(parameter: torch.Tensor) -> bool:
            return validation.is_to_be_trained(parameter) or parameter.grad is not None

        self.attach(p for p in self.contents.parameters() if takes_part(p))
        params.update_router.refresh()
        commits = self._open_commits = self._begin_step()
        updates = [
            ParamUpdate(group, param, None, schedule.scale)
            for group in self.contents.groups
            for p in group["params"]
            if takes_part(p) and (param := params.find(p)) is not None
        ]
        for group in self.contents.groups:
            validation.check_hyper(group)
        for update in updates:
            parameter, group = update.param.parameter, update.group
            if not update.param.fits(group):
                validation.refuse_change(
                    parameter, group, update.param.family, update.param.numel, "A parameter"
                )
        schedule.begin(make_plan(updates, params, self.contents.states, 1.0, commits=commits))

    def wait_for_gradient(self) -> bool:
        """Wait for a gradient of the open step that is still being copied; False: there is none."""
        if self._early is None:
            return False
        no_reads = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001  # of a weight
        with SignalsDeferred(), self._early.lock, no_reads:  # a thread may be undoing the step
            if self._early.phase is not Phase.OPEN:
                return False
            # After an interrupt a gradient may have been removed and not used.
            with poisoning(self._params.store.pipeline):
                return self._params.update_router.step_path.wait_for_copy()

    def _end_open_step(self, schedule: BackwardOverlap, factor: float, scale: float) -> None:
        """End the step that backward has begun, or begin and end it now.

        ``factor`` and ``scale`` are those of a step that is taken anew.
        """
        params = self._params
        params.store.pipeline.handle.live()
        schedule.check_unchanged()
        late, new_params = collect(
            self.contents.groups, params, self._param_filter.manages, backward_overlap=True
        )
        if schedule.is_open:  # those that were frozen, and have states
            managed = [p for _, p, _ in late if params.find(p) is not None]
            new_params += [p for p in managed if params.get(p).number not in schedule.written]
        gradients = sum(gradient_of(p) is not None for p in self.contents.parameters())
        self._module_parameters.check_step(gradients)
        if not schedule.is_open:
            _refuse_used(self.contents.parameters())
            self._open_step(schedule)
        elif new_params and isinstance(schedule, SpeculativeOverlap):
            schedule.undo(uploads=False)
            self._take_new_step(factor, scale)
            return
        elif new_params:
            count = format_count(len(new_params), "parameter")
            message = (
                f"{count} got a gradient and had been frozen when"
                ' backward began: with overlap="backward" updates have begun by then. Unfreeze'
                " before backward."
            )
            raise OptionError(message)
        commits = self._open_commits
        with self._ending_step(schedule.held, commits=commits, is_open=True):
            updates = [ParamUpdate(g, params.get(p), gradient) for g, p, gradient in late]
            schedule.step(StepPlan(updates, [], [], commits=commits), self.contents.states)


def _refuse_used(parameters: Iterable[torch.Tensor]) -> None:
    """Raise OptionError where the gradients are those of the last step."""
    if any(isinstance(p.grad, ConsumedGradient) for p in parameters):
        refuse(PublicCall.STEP, Phase.USED, Phase.USED.value)


def _check_gradient(param: ManagedParam, groups: Groups) -> None:
    """Raise the error for a gradient that no update can take."""
    if can_update(param.parameter, gradient_and_event(param.owner)[0]):
        return
    for group in groups:
        for index, parameter in enumerate(group["params"]):
            if parameter is param.owner:
                check_due(groups, group, index, param)


def collect(
    groups: Groups,
    params: ParamTable,
    manages: Callable[[torch.Tensor], bool],
    *,
    backward_overlap: bool = False,
) -> tuple[list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Return (group, parameter, gradient) of this step, checked, and parameters without states.

    ``backward_overlap``: gradients may have been consumed already. Raises before anything is
    changed.
    """
    gradients = []
    new_params = []
    for group in groups:
        validation.check_hyper(group)
        validation.refuse_torch_keywords(group)
        for index, parameter in enumerate(group["params"]):
            gradient = gradient_of(parameter)
            param = params.find(parameter)
            if gradient is None:
                continue
            if isinstance(gradient, ConsumedGradient):
                if not backward_overlap:
                    refuse_used(name_of(groups, group, index))
                continue
            if param is None and not manages(parameter):
                validation.refuse_average(group)
                continue
            shard = shard_of(parameter)
            if param is not None:
                param.shard = shard
            if param is None or not can_update(param.parameter, gradient) or not param.fits(group):
                check_due(groups, group, index, param)
            if param is None:
                new_params.append(parameter)
            gradients.append((group, parameter, gradient_in_order(shard, gradient)))
    return gradients, new_params


def check_due(
    groups: Groups, group: dict[str, Any], index: int, param: ManagedParam | None
) -> None:
    """Raise for a parameter or a gradient that the kernels cannot take."""
    shard = shard_of(group["params"][index])
    parameter = in_order(shard, order_of(shard)) if param is None else param.parameter
    gradient = gradient_of(group["params"][index])
    fits = param is None or param.fits(group)
    if can_update(parameter, gradient) and fits:
        return
    name = name_of(groups, group, index)
    validation.check_parameter(parameter, name)
    if gradient is not None:
        validation.check_gradient(parameter, gradient, name)
    if param is not None:
        validation.refuse_change(parameter, group, param.family, param.numel, name)


def make_plan(
    updates: list[ParamUpdate],
    params: ParamTable,
    states: States,
    factor: float,
    *,
    commits: bool = False,
) -> StepPlan:
    """Round the hyper-parameters once, and lay out the pipeline's input.

    ``factor`` multiplies gradients.
    """
    counts = [
        step_of(
            update.param,
            # A mapping that makes what it lacks must make nothing for a gradient that never comes.
            states[update.param.owner]
            if update.gradient is not None
            else states.get(update.param.owner, {}),
            params.store,
            begins=update.gradient is not None,
        )
        for update in updates
    ]
    steps = [int(count.item()) + 1 for count in counts]
    indices, scalars = scalar_table(((u.group, u.scale) for u in updates), steps, factor)
    by_number = {
        update.param.number: _row(update, params.store, index, step)
        for update, step, index in zip(updates, steps, indices, strict=True)
    }
    # A commit takes the weights of parameters without an update too.
    rows = [by_number.get(p.number) or StepRow(weight=p.weight) for p in params.all()]
    return StepPlan(updates, counts, rows, scalars, commits)


def _row(update: ParamUpdate, store: StateStore, scalars: int, step: int) -> StepRow:
    param = update.param
    # Gradients that are not read in place come by the feed of their tier.
    gradient = update.gradient if param.tier is Tier.HOST else None
    # A function of the parameter and its step alone, so that a resumed run rounds alike.
    # The columns of the native table are signed, so a key has 63 bits.
    key = (step * _GOLDEN + param.number * (_GOLDEN >> 7)) & ((1 << 63) - 1)
    return StepRow(
        param.weight,
        gradient,
        must_seed(param, store),
        scalars,
        key,
        expected=gradient is None,
    )
