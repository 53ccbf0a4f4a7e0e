"""``overlap=DelayedUpdate()``: updates run during a forward and backward that use old weights.

[Note: Delayed updates] This is the one inexact schedule, the delayed parameter update of
ZeRO-Offload. Let w(t) be the weights after t updates and g(t) the gradients of step t.
``step()`` number t publishes w(t - 1), starts the update from w(t - 1) to w(t) by g(t), and
returns; so forward and backward t + 1 compute g(t + 1) from w(t - 1). The hyper-parameters, clip
factor and loss scale of an update are those of the ``step()`` that started it.

The first use of the weights after ``step()`` decides. After a forward with gradients, all reads
until the next ``step()`` get the old weights. Any other first use, a forward without gradients or
any other read of a weight ([Note: Unpublished]), applies the pending update, and the next forward
uses the new weights. ``wait()``, which everything that needs whole states calls, applies it at any
time, except during a forward or backward, whose weights it would change. Steps of the warm-up are
exact, and so is a step that commits: no update is pending then, so the run continues as a resumed
run does.

An update writes to a copy of the weight. A parameter on an accelerator has one, its host weight.
Its gradient is copied to host memory while forward and backward run, whose hooks start the copies;
its new weight is copied to the device when it is published. In host memory the copy is made anew
for each update, and a checksum shows writes to the weight until it is published: those through
``.data`` change no version counter.
"""

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch

import tensorstow._native as _native
from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import DelayedUpdate
from tensorstow.states.memory import StateMemory
from tensorstow.step.gradient_feed import OverlapWith
from tensorstow.step.host_weight import upload
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.step.param_table import ParamTable
from tensorstow.step.replaced import UpdateUnderWay, refusal
from tensorstow.step.schedule import OngoingSchedule, Synchronous, record_step, weakly
from tensorstow.step.step_plan import States
from tensorstow.step.unpublished import mark_published

logger = logging.getLogger("tensorstow")
_FORWARD = torch.nn.Module._call_impl.__code__  # noqa: SLF001
_MANY = 3
_DURING_PASSES = (
    "The delayed update was to be applied, by wait() or something that needs whole states, while a"
    " forward or backward computes with the weights from before. Call it in the thread that trains,"
    " after step(); from a signal handler call request_commit() instead."
)
_READ_EARLY = (
    "DelayedUpdate delays nothing: %d steps in a row, weights were read between step() and the next"
    " forward of module= with gradients, which applied their update. Read them after that forward,"
    " or leave overlap= out."
)
_COMPILED = (
    "DelayedUpdate delays nothing: the model is compiled as a whole, so no hook runs before its"
    " forward. Compile its blocks instead: model.layers[i] = torch.compile(model.layers[i])."
)


class ModelHooks:
    """Hooks on a model that report each use of its weights to the schedule."""

    def __init__(
        self, module: torch.nn.Module, schedule: Callable[[], "DelayedOverlap | None"]
    ) -> None:
        """Keep ``schedule`` as a weak reference: the model must not keep its optimizer alive."""
        self._module, self._schedule = weakref.ref(module), schedule
        self.are_compiled = False
        """Whether a forward was traced as a whole: no hook runs before that graph."""
        self._hooks: list[Any] = [module.register_forward_pre_hook(self._before, prepend=True)]
        # Any part may be saved by itself, and lets copies of gradients move on when it runs.
        for part in module.modules():
            saving: Any = part.register_state_dict_pre_hook
            self._hooks.append(saving(self._before_state_dict))
            self._hooks.append(part.register_forward_pre_hook(self._before_part))

    def close(self) -> None:
        """Remove the hooks. Idempotent."""
        for hook in self._hooks:
            hook.remove()

    def __reduce__(self) -> tuple[object, ...]:
        """Return hooks that do nothing, for a copied or saved model."""
        return ModelHooks, (torch.nn.Module(), _no_schedule)

    def is_in_forward(self) -> bool:
        """Return whether the stack of this thread is in a forward of the model."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001
        module = self._module()
        while frame is not None:
            if frame.f_code is _FORWARD and frame.f_locals.get("self") is module:
                return True
            frame = frame.f_back
        return False

    def _before(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            self._traced()
            return
        schedule = self._schedule()
        if schedule is not None and torch.is_grad_enabled():
            schedule.begin_passes()
        elif schedule is not None:
            schedule.apply_early()

    def _before_part(self, *_: object) -> None:
        schedule = None if torch.compiler.is_compiling() else self._schedule()
        if schedule is not None:
            schedule.move_on()

    def _before_state_dict(self, *_: object) -> None:
        schedule = self._schedule()
        if schedule is not None:
            schedule.wait()

    def _traced(self) -> None:
        self.are_compiled = True
        schedule = self._schedule()
        if schedule is not None:
            schedule.apply_early()

    # As in forward_waits: what torch.compiler.assume_constant_result does, without its import.
    _traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


class DelayedOverlap(OngoingSchedule):
    """``overlap=DelayedUpdate()``."""

    def __init__(self, params: ParamTable, module: torch.nn.Module, delayed: DelayedUpdate) -> None:
        """Delay updates of ``params``, which the forward of ``module`` reads."""
        super().__init__(params)
        self._exact = Synchronous(params)
        self._warmup_steps = delayed.warmup_steps
        self.beside_backward = weakly(self.move_on)
        self._hooks = ModelHooks(module, weakref.ref(self))
        self._copying: list[UpdateUnderWay] = []
        """Updates in ``_under_way`` whose gradients must still be copied from an accelerator."""
        self._trainer: int | None = None
        """The thread whose forward and backward read the weights without the pending update."""
        self._copies: dict[int, torch.Tensor] = {}
        """Weights that updates write to, by the numbers of parameters in host memory."""
        self._checksums: dict[int, int] = {}
        """Checksums of weights in memory when the pending update began, by number."""
        self._most_held_bytes = 0
        self._early_steps = 0
        """Number of consecutive steps that a read of a weight has applied."""
        self._has_warned = False

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """Gradients that may still be read."""
        updates = [under_way.update for under_way in self._under_way.values()]
        return [update.gradient for update in updates if update.gradient is not None]

    def counted_in(self, memory: StateMemory) -> StateMemory:
        """Return ``memory`` with the peak bytes of ``held`` and the copies of weights."""
        copies = sum(copy.nbytes for copy in self._copies.values())
        return replace(
            memory,
            host_weight_bytes=memory.host_weight_bytes + copies,
            gradient_bytes=self._most_held_bytes,
        )

    def step(self, plan: StepPlan, states: States) -> None:
        """Start the step of ``plan`` and return; the previous one is already applied."""
        step = 1 + max(int(count.item()) for count in plan.counts)
        self._warn_if_nothing_is_delayed()
        if plan.commits or step <= self._warmup_steps or self._hooks.are_compiled:
            self._exact.step(plan, states)
            return
        self._use_copies(plan)
        path = self._params.update_router.step_path
        with self.lock:
            path.begin(plan, OverlapWith.BOTH)
            path.close()
            record_step(plan, states)
            self._under_way = {id(u.param.owner): UpdateUnderWay(u) for u in plan.updates}
            under_way = self._under_way.values()
            self._copying = [u for u in under_way if u.update.param.tier is Tier.DEVICE]
        self._most_held_bytes = max(self._most_held_bytes, sum(g.nbytes for g in self.held))
        self._hide(self.apply_early)

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Apply the pending update, of all parameters.

        Raises OptionError if a forward or backward computes with the weights from before.
        """
        del ids
        self._params.update_router.step_path.join()  # also if another stream has joined it
        if self._under_way:
            if self._trainer is not None and self._may_be_in_a_pass():
                raise OptionError(_DURING_PASSES)
            self._apply()

    def finish(self) -> None:
        """Apply the pending update: it is the last one."""
        self._hooks.close()
        self._apply()

    @torch.no_grad()
    def drop_gradients(self, parameters: Iterable[torch.Tensor], *, to_zero: bool) -> None:
        """Put zeros in place of gradients that the pending update still reads."""
        # By storage: an update may read a view of the gradient in ``.grad``.
        read = {g.untyped_storage().data_ptr() for g in self.held} if to_zero else set()
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.untyped_storage().data_ptr() in read:
                parameter.grad = torch.zeros_like(gradient)

    # --- called by the model's hooks ---

    def begin_passes(self) -> None:
        """Begin a forward and backward, which read the old weights until the next step."""
        with self.lock:
            if not self._under_way or self._trainer is not None:
                return
            self._early_steps, self._trainer = 0, threading.get_ident()
            for under_way in self._under_way.values():
                # Both passes may read the old weight: the update writes to a copy.
                mark_published(under_way.update.param.owner)

    def apply_early(self, ids: Iterable[int] = ()) -> None:
        """Apply the pending update before a weight is read, unless a forward has begun."""
        del ids
        if self._trainer is None:
            self._early_steps += bool(self._under_way)
            self.wait()

    def move_on(self) -> None:
        """Start copies of gradients from an accelerator; release those that were copied."""
        if not self._copying:
            return
        path = self._params.update_router.step_path
        with SignalsDeferred(), self.lock:
            path.move_on()
            for under_way in self._copying:
                if not path.needs(under_way.update.param):
                    under_way.release_gradient()
            self._copying = [u for u in self._copying if path.needs(u.update.param)]

    # --- internals ---

    def _use_copies(self, plan: StepPlan) -> None:
        """Let the updates of ``plan`` write to copies of the weights."""
        plan.uploads = False
        for param in (update.param for update in plan.updates):
            if param.tier is not Tier.DEVICE:
                row = plan.rows[param.number]
                plan.rows[param.number] = row._replace(weight=self._copy_of(param))

    def _copy_of(self, param: ManagedParam) -> torch.Tensor:
        """Return the copy of a weight in host memory, equal to it."""
        weight = param.parameter.detach()
        copy = self._copies.get(param.number)
        if copy is None or copy.shape != weight.shape:
            copy = self._copies[param.number] = torch.empty_like(weight)
        copy.copy_(weight)  # always: a write through ``.data`` changes no version
        self._checksums[param.number] = _checksum(weight)
        return copy

    def _check_unwritten(self, param: ManagedParam) -> None:
        """Raise OptionError if a weight was written, by whatever way, during its update."""
        if param.tier is Tier.DEVICE:
            return
        if _checksum(param.parameter.detach()) != self._checksums[param.number]:
            raise refusal(param, "was written")

    def _may_be_in_a_pass(self) -> bool:
        # A pass in another thread cannot be seen from here, so one is assumed.
        is_apart = self._trainer != threading.get_ident()
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        return is_apart or in_backward or self._hooks.is_in_forward()

    def _apply(self) -> None:
        with self._publishing():
            if not self._under_way:
                return
            try:
                self._params.update_router.step_path.wait()
                for under_way in self._under_way.values():
                    under_way.check()
                    self._check_unwritten(under_way.update.param)
            except StowError:
                self._forget()  # all weights are those from before the update: they may be read
                raise
            self._publish([under_way.update.param for under_way in self._under_way.values()])
            self._forget()

    @torch.no_grad()
    def _publish(self, params: Sequence[ManagedParam]) -> None:
        remote = [param for param in params if param.tier is Tier.DEVICE]
        # The upload goes through ``.data``, which changes no version counter.
        torch.autograd.graph.increment_version([param.parameter for param in remote])
        upload((param.on_host for param in remote), self._params.links.weights)
        for param in params:
            if param.tier is not Tier.DEVICE:
                param.parameter.copy_(self._copies[param.number])
            param.remember()

    def _forget(self) -> None:
        super()._forget()
        self._copying, self._trainer = [], None

    def _warn_if_nothing_is_delayed(self) -> None:
        if self._has_warned:
            return
        if self._hooks.are_compiled:
            logger.warning(_COMPILED)
        elif self._early_steps >= _MANY:
            logger.warning(_READ_EARLY, self._early_steps)
        else:
            return
        self._has_warned = True


def _checksum(weight: torch.Tensor) -> int:
    return _native.checksum(weight.data_ptr(), weight.nbytes)


def _no_schedule() -> None:
    """Return no schedule."""
