"""``overlap="backward"``: updates run during the backward that computes their gradients.

[Note: The rest] Where updates take longer than backward, some are left at ``step()``. Of a model
that ``stow`` placed, the next forward waits for each, module by module, as with
``overlap="forward"``. It needs first what backward computed last, so the newest gradients are used
first, and what is left is what forward needs last. ``step()`` waits for the rest of a step that
commits, of updates on the device, and of weights on disk, which are read again in forward; and of
other models, whose scripts may have views of weights from before.

[Note: Backpressure] With a small batch, backward makes gradients faster than a disk moves states,
and waiting gradients would fill host memory. Backward blocks while they take more than a window of
bytes. The window is several times what the ring works on, so the disk is never idle because of it,
and the time that backward loses would otherwise be lost at the end of the step. Gradients that a
device is still computing or copying are not in the window (``D2HQueue`` bounds them): a host that
waited for those would leave the device without work. Where units are large the window has room for
several of them: updates would run out of gradients while the device computes the next unit's.

[Note: Final] A parameter's gradient is final when autograd has accumulated it in the last backward
of the step. ``accumulation_steps`` identifies the last backward: by count, or by a function, as the
last step of an epoch may have fewer. Or all other backwards run in ``accumulate()``. Gradients of
parameters that took part in fewer of them are final when ``step()`` is called.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import AccumulationSteps, reaches_device
from tensorstow.io.device_link import DeviceEvent
from tensorstow.states.memory import StateMemory
from tensorstow.states.native_pipeline import poisoning
from tensorstow.step.forward_waits import ForwardWaits
from tensorstow.step.gradient_feed import OverlapWith
from tensorstow.step.legal_calls import LEGAL, Phase, PublicCall, refuse
from tensorstow.step.managed_param import (
    ManagedParam,
    StepPlan,
    fill_with_nan,
    publish_weight,
    write_to_copies,
)
from tensorstow.step.param_table import ParamTable
from tensorstow.step.schedule import UpdatesInForward, by_last, record_step
from tensorstow.step.step_plan import States, scalar_table
from tensorstow.tensors.dtensor import gradient_and_event, gradient_in_order, order_of, shard_of
from tensorstow.tensors.placeholder import (
    ABORT_ADVICE,
    RECOVERY_ADVICE,
    ConsumedGradient,
    GradientKeeper,
    refuse_used,
)

WINDOW_BYTES = 64 << 20
_UNITS_IN_WINDOW = 3
"""One is updated, one waits, and the device copies the next one down."""
_CHECK_BYTES = 1 << 20
"""Bytes of new gradients after which those no longer needed are freed."""


def window_of(unit_bytes: int) -> int:
    """Return the most bytes of gradients in host memory that wait for their update.

    ``unit_bytes``: bytes of the gradients that a device copies down together; 0: no device.
    """
    return max(WINDOW_BYTES, _UNITS_IN_WINDOW * unit_bytes)


@torch.inference_mode(mode=False)
@torch.enable_grad()
def newest_backward() -> int:
    """Return the number of a backward that begins now: those before it have lower ones."""
    numbers: list[int] = []
    # Every backward takes the next number, so an empty one shows where the count is.
    one = torch.ones((), device="cpu", requires_grad=True)
    two = one + one
    register: Any = two.register_hook
    register(lambda _: numbers.append(torch._C._current_graph_task_id()))  # noqa: SLF001
    torch.autograd.grad(two, one)
    return numbers[0]


class ConsumedGradients:
    """The gradients of a step that updates have consumed, held while they are still read."""

    def __init__(
        self, accumulation_steps: AccumulationSteps, is_published: Callable[[int], bool]
    ) -> None:
        """Hold a gradient until ``is_published`` of its parameter's number."""
        if not callable(accumulation_steps) and accumulation_steps < 1:
            message = f"accumulation_steps={accumulation_steps} was given: it must be at least 1."
            raise OptionError(message)
        self._accumulation_steps = accumulation_steps
        self._is_published = is_published
        self._counts: dict[int, int] = {}
        self._accumulating = 0
        self._backward: int | None = None
        self._held: list[tuple[int, torch.Tensor]] = []
        self._buffers: dict[int, int] = {}
        """Bytes of the buffers of ``_held``, by address: gradients may share a buffer."""
        self._bytes = 0
        """Sum of ``_buffers``."""
        self._needed = 0
        """Number of gradients that were still needed at the last check."""
        self._new_bytes = 0
        """Bytes of the gradients added since the last check."""
        self.most_bytes = 0
        """The most bytes of consumed gradients that were held at once."""
        self.holds_all = False
        """Whether all are held until the step ends: it may be undone."""
        self._placeholders: list[tuple[torch.Tensor, ConsumedGradient]] = []
        self._originals: dict[int, torch.Tensor] = {}
        """What was in ``.grad``, by number, if the step may be undone."""
        self.keeper_reference: Callable[[], GradientKeeper | None] | None = None
        """A weak reference to what gives gradients back; None: nothing does."""
        self.arrived: list[int] = []
        """Numbers of parameters, in the order in which their gradients became final."""

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """Treat no gradient inside the block as final: more will be added to it."""
        # A count and not a flag: the blocks may be nested.
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def is_final(self, number: int) -> bool:
        """Count one more gradient of a parameter; return whether it was the last of the step.

        Raises OptionError if a second backward adds to a step whose updates have begun.
        """
        if self._accumulating:
            return False
        if not self._is_last(number):
            return False
        # What torch calls a graph task is one call of backward; a reentrant checkpoint has its own.
        task = torch._C._current_graph_task_id()  # noqa: SLF001
        if self._backward is None:
            self._backward = task
        elif self._backward != task:
            message = (
                "Gradients of one step came from two backward passes, and updates by the first have"
                ' begun. With overlap="backward" set accumulation_steps=, or run all but the last'
                " backward under `with optimizer.accumulate():`. Checkpointing with"
                " use_reentrant=True runs passes of its own: use use_reentrant=False, or"
                f' overlap="none". {RECOVERY_ADVICE}'
            )
            raise OptionError(message)
        return True

    def _is_last(self, number: int) -> bool:
        """Return whether this is the parameter's last backward of the step."""
        if callable(self._accumulation_steps):
            return self._accumulation_steps()
        self._counts[number] = self._counts.get(number, 0) + 1
        return self._counts[number] >= self._accumulation_steps

    def consume(
        self,
        number: int,
        parameter: torch.Tensor,
        use: Callable[[torch.Tensor, DeviceEvent | None], None],
    ) -> None:
        """Replace ``parameter.grad`` by a placeholder and pass the gradient to ``use``."""
        gradient, copied = gradient_and_event(parameter)
        whole = parameter.grad
        if whole is None or gradient is None:
            return
        if isinstance(gradient, ConsumedGradient):
            refuse_used("A parameter")
        shard = shard_of(parameter)
        if copied is not None and order_of(shard) is not None:  # it may have to be copied
            copied.synchronize()
            copied = None
        # Hold the tensor itself if possible: while it is alive, its host buffer is not reused.
        plain = gradient.detach() if gradient.requires_grad else gradient
        contiguous = gradient_in_order(shard, plain)
        placeholder = ConsumedGradient(parameter, whole.dtype)
        placeholder.number, placeholder.keeper_reference = number, self.keeper_reference
        keeper = None if self.keeper_reference is None else self.keeper_reference()
        if keeper is not None:
            placeholder.step_number = keeper.open_number
        if self.holds_all:
            self._originals[number] = whole
        parameter.grad = placeholder
        self._placeholders.append((parameter, placeholder))
        # Free old gradients before the new one counts towards the peak.
        if self._is_check_due():
            self.free_published()
        self._hold(number, contiguous)
        self.most_bytes = max(self.most_bytes, self._bytes)
        self.arrived.append(number)
        use(contiguous, copied)

    def limit_bytes(
        self, window: Callable[[], int], wait_for_one: Callable[[Sequence[int]], bool]
    ) -> None:
        """Block until the held gradients have at most ``window()`` bytes.

        ``wait_for_one`` gets their parameters' numbers, the oldest first, and waits for an update.
        Return as well if it returns False.
        """
        # A wait would free nothing: all gradients stay until the step ends.
        if self.holds_all:
            return
        if self._bytes > window():
            self.free_published()
        while self._bytes > window() and wait_for_one([n for n, _ in self._held]):
            self.free_published()

    def free_published(self) -> None:
        """Free gradients whose weights are published.

        All are checked, not only the oldest: it may wait for another gradient of its chunk.
        """
        held = [(n, g) for n, g in self._held if not self._is_published(n)]
        self._forget_held()
        for number, gradient in held:
            self._hold(number, gradient)
        self._needed, self._new_bytes = len(held), 0

    def _is_check_due(self) -> bool:
        """Return whether all held gradients are to be checked now.

        A check for each new gradient takes quadratic time, which dominates backward if gradients
        are small and share a chunk.
        """
        if self.holds_all:
            return False
        is_grown = len(self._held) >= self._needed + self._needed // 4
        return is_grown or self._new_bytes >= _CHECK_BYTES

    def _hold(self, number: int, gradient: torch.Tensor) -> None:
        self._held.append((number, gradient))
        storage = gradient.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if address not in self._buffers:
            self._buffers[address] = nbytes
            self._bytes += nbytes
            self._new_bytes += nbytes

    def _forget_held(self) -> None:
        self._held, self._buffers = [], {}
        self._bytes = self._needed = self._new_bytes = 0

    @property
    def held(self) -> list[torch.Tensor]:
        """The consumed gradients that may still be read."""
        return [gradient for _, gradient in self._held]

    @property
    def held_by_number(self) -> dict[int, torch.Tensor]:
        """The same by the numbers of their parameters."""
        return dict(self._held)

    @property
    def has_placeholders(self) -> bool:
        """Whether each consumed gradient still has its placeholder in ``.grad``."""
        return all(parameter.grad is placeholder for parameter, placeholder in self._placeholders)

    def give_back(self) -> dict[int, torch.Tensor]:
        """Put the gradients back into ``.grad``, and begin anew; return them by number."""
        returned = {}
        for parameter, placeholder in self._placeholders:
            if parameter.grad is placeholder:
                returned[placeholder.number] = self._originals[placeholder.number]
                parameter.grad = returned[placeholder.number]
        self.restart()
        return returned

    def remove_placeholders(self) -> None:
        """Remove placeholders from ``.grad``: their step has failed or was aborted."""
        for parameter, placeholder in self._placeholders:
            if parameter.grad is placeholder:
                parameter.grad = None
        self._placeholders.clear()

    def restart(self) -> None:
        """Begin a new step: all gradients of the last one have been used."""
        self._counts.clear()
        self._forget_held()
        self._placeholders.clear()
        self._originals = {}
        self._backward = None
        self.arrived = []


class BackwardOverlap(UpdatesInForward):
    """``overlap="backward"``: a step begins with its first final gradient."""

    waits_before_step = False  # it has begun in backward, or waits when it begins
    can_undo: ClassVar[bool] = False
    """Whether updates that have begun can be undone."""

    def __init__(
        self,
        params: ParamTable,
        accumulation_steps: AccumulationSteps,
        waits: ForwardWaits | None = None,
    ) -> None:
        """``accumulation_steps`` decides which gradients are final ([Note: Final]).

        ``waits`` blocks modules until their weights are new; None: the optimizer has no model.
        """
        super().__init__(params)

        # The function refers to ``params`` alone: with ``self`` the schedule would be in a cycle.
        def is_published(number: int) -> bool:
            return not params.update_router.step_path.needs(params.all()[number])

        self.gradients = ConsumedGradients(accumulation_steps, is_published)
        self._waits = waits
        self.scale = 1.0
        """What updates that begin in backward divide gradients by."""
        self.begins_now = True
        """Whether the first final gradient begins the step; False: ``step()`` does."""
        self._going_on: ForwardWaits | None = None
        """Waits for what is left of the open step ([Note: The rest]); None: ``step()`` waits."""
        self._plan: StepPlan | None = None
        self.written: dict[int, tuple[int, int]] = {}
        """Version and address of each weight of the open step, by number, as its update began."""
        self._last_order: list[int] = []
        """The order of arrival that the pipeline's order is of."""
        self._next_order: list[int] = []
        """That of the last step; the pipeline takes it when the next one begins."""
        self._task = -1
        self._has_ended = False
        self._given_up = -1
        """The newest backward that began before the last step was aborted."""

    @property
    def phase(self) -> Phase:
        """Where the optimizer is in its step ([Note: Legal calls]); never USED."""
        if self._plan is None:
            return Phase.BETWEEN
        # Only hooks of the step's own backward, in either thread, see it as running.
        if not self._has_ended and self._task == torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return Phase.RUNNING
        return Phase.OPEN if self.why_broken is None else Phase.BROKEN

    @property
    def why_broken(self) -> str | None:
        """Why the open step cannot be completed; None if it can."""
        if not self._has_ended:
            return "backward has not ended (it raised, or another thread is in it)"
        if not self.gradients.has_placeholders:
            return "a gradient was dropped or replaced after backward (as by model.zero_grad())"
        if is_written(self._plan, self.written):
            return "a weight was written or replaced between backward and step()"
        return None

    def require(self, call: PublicCall) -> None:
        """Raise OptionError where ``call`` is not legal now ([Note: Legal calls])."""
        phase = self.phase
        if call not in LEGAL[phase]:
            self._params.store.pipeline.handle.live()
            refuse(call, phase, self.why_broken or phase.value)

    def is_given_up(self) -> bool:
        """Return whether the step of the backward that calls this hook was aborted."""
        return -1 < torch._C._current_graph_task_id() <= self._given_up  # noqa: SLF001

    def break_off(self) -> None:
        """Mark the open step as broken: a gradient was not taken."""
        # Without a task, the end of a backward that goes on cannot mark the step as ended.
        self._has_ended, self._task = False, -1

    def _watch_backward(self, plan: StepPlan) -> None:
        """Watch the running backward, if any, to learn whether it ends without an error."""
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001
        self._has_ended = self._task == -1
        if self._has_ended:
            return
        # The engine holds the callback until backward ends, and must not keep the optimizer alive.
        schedule = weakref.ref(self)

        def ended() -> None:  # not called if a hook or backward has raised
            alive = schedule()
            # With another plan the step was aborted; without a task it is broken.
            if alive is not None and alive._plan is plan and alive._task != -1:  # noqa: SLF001
                alive._has_ended = True  # noqa: SLF001

        engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP2 does
        engine.queue_callback(ended)

    @property
    def is_open(self) -> bool:
        """Whether updates of a step have begun that ``step()`` has not ended."""
        return self._plan is not None

    def begin(self, plan: StepPlan) -> None:
        """Begin a step without gradients."""
        params = self._params
        pipeline = params.store.pipeline
        if self.norms is not None:
            self.norms.clear()
        if self._next_order != self._last_order:
            pipeline.order(by_last(params.store.chunks, self._next_order))
            self._last_order = self._next_order
        elif not self._last_order:
            # The model's order is not known yet: backward mostly runs from its last layer.
            last_first = range(len(params.all()) - 1, -1, -1)
            pipeline.order(by_last(params.store.chunks, last_first))
        if self._nan_until_published:
            write_to_copies(plan)
        waits = rest_waits(self._waits, plan) if self.may_go_on else None
        beside = OverlapWith.BACKWARD if waits is None else OverlapWith.BACKWARD_AND_FORWARD
        with poisoning(pipeline):  # an interrupt may leave the step open in the pipeline alone
            goes_on = params.update_router.step_path.begin(plan, beside, undoable=self.can_undo)
            self._going_on = waits if goes_on else None
            self.written = {u.param.number: _written(u.param) for u in plan.updates}
            self._watch_backward(plan)
            self._plan = plan

    def on_gradient(self, param: ManagedParam) -> None:
        """Pass the final gradient of ``param`` to its update."""
        if self._plan is None:
            message = "A gradient was given to an update outside of a step."
            raise OptionError(message)
        path = self._params.update_router.step_path

        def use(gradient: torch.Tensor, copied: DeviceEvent | None) -> None:
            # Before the weight changes: a graph that still needs the old one must not go on.
            torch.autograd.graph.increment_version(param.parameter)
            if param.host is not None:
                if copied is not None:
                    copied.synchronize()  # copies of the weight to the device are before it
                fill_with_nan(param)
            # Our own changes above must not count as writes by others.
            self.written[param.number] = _written(param)
            path.offer(param, gradient, copied)

        try:
            gradient, copied = gradient_and_event(param.owner)
            # The norm comes first: the update may free the gradient's memory.
            if self.norms is not None and gradient is not None:
                self.norms.take(param.number, gradient, copied)
            self.gradients.consume(param.number, param.owner, use)
            window = window_of(self.unit_bytes)
            self.gradients.limit_bytes(lambda: window + path.arriving_bytes, path.wait_for_one)
        except BaseException as error:  # an interrupt: a gradient may be removed and not used
            self._params.store.pipeline.handle.poison(error)
            self.gradients.remove_placeholders()
            raise

    def check_unchanged(self) -> None:
        """Raise OptionError if hyper-parameters or gradients changed since the step began."""
        plan = self._plan
        if plan is None:
            return
        self.require(PublicCall.STEP)
        if are_scalars_changed(plan):
            message = (
                "A hyper-parameter (lr, betas, eps, weight_decay, maximize) was changed between"
                ' backward and step(), and with overlap="backward" updates have begun by then.'
                f" Change it back, call step(), and change it after that. Or {ABORT_ADVICE}."
            )
            raise OptionError(message)

    def step(self, plan: StepPlan, states: States) -> None:
        """End the step that is open; ``plan`` has gradients that were not final before."""
        opened = self._plan
        if opened is None:
            message = "A step was ended before it had begun."
            raise OptionError(message)
        params, path = self._params, self._params.update_router.step_path
        # The gradients below were not final during backward.
        on_time = len(self.gradients.arrived)
        for update in plan.updates:
            self.on_gradient(update.param)
        order = self.gradients.arrived
        arrived = set(order)
        self._plan = None
        try:
            path.close()
            if self._going_on is None:
                path.wait()
        except BaseException:
            self.gradients.remove_placeholders()  # the next backward would add to them
            params.store.pipeline.memory.append(self.gradients.held)  # they may be read still
            raise
        finally:
            # ``restart`` forgets the gradients, and updates that go on still read them.
            still_read = self.gradients.held_by_number
            self.gradients.restart()
        # Late gradients come in the order of the groups, which is not backward's.
        if on_time == len(order):
            self._next_order = order  # from the next step on: this one may go on
        for update in opened.updates:
            # A weight without a gradient was neither updated nor hidden: its copy is dropped.
            if update.param.number not in arrived:
                update.param.host = None
            elif self._going_on is None:
                publish_weight(update.param)
        pairs = zip(opened.updates, opened.counts, strict=True)
        ended = [(update, count) for update, count in pairs if update.param.number in arrived]
        # Only parameters that got a gradient count the step.
        opened.updates = [update for update, _ in ended]
        opened.counts = [count for _, count in ended]
        record_step(opened, states)
        if self._going_on is not None:
            updates = opened.updates
            left = [u._replace(gradient=still_read.get(u.param.number)) for u in updates]
            # The feeds of an accelerator share the memory of weights that they copy up.
            on_host = [u for u in left if u.param.tier is not Tier.DEVICE]
            self._go_on(left, self._going_on, self._shared(on_host))

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return once these weights, or all, are new. Raises OptionError before ``step()``.

        During backward, a checkpoint runs its forward again. Its weights are not updated yet; if
        they are, autograd raises an error.
        """
        if self.is_open:
            if torch._C._current_graph_task_id() == -1:  # noqa: SLF001
                self.require(PublicCall.FORWARD)
            return
        super().wait(ids)

    def abort(self) -> None:
        """Drop the open step and its gradients: its store is closed.

        Hooks of a backward that has begun may still run: ``is_given_up`` is True in them ([Note:
        Hooks] in call_lock).
        """
        super().abort()
        self._given_up = newest_backward()
        self._plan = None
        self._last_order, self._next_order = [], []
        self.gradients.remove_placeholders()
        self.gradients.restart()

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """Gradients that were taken out of ``.grad`` and may still be read."""
        left = (under_way.update.gradient for under_way in self._under_way.values())
        return [*self.gradients.held, *(gradient for gradient in left if gradient is not None)]

    def counted_in(self, memory: StateMemory) -> StateMemory:
        """Return ``memory`` with the peak bytes of ``held``."""
        return replace(memory, gradient_bytes=self.gradients.most_bytes)

    # --- what users do with gradients ---

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which no gradient is final."""
        return self.gradients.accumulate()

    def drop_gradients(self, parameters: Iterable[torch.Tensor], *, to_zero: bool) -> None:
        """Drop gradients of earlier micro-batches; put zeros in place of consumed ones."""
        self.gradients.restart()
        for parameter in parameters if to_zero else ():
            if isinstance(parameter.grad, ConsumedGradient):  # it has no elements to be zeroed
                parameter.grad = torch.zeros_like(parameter)

    def check_clipping(self) -> None:
        """Raise OptionError: gradients are used before their norm is known."""
        advice = _exact_overlaps(self._params, has_module=self._waits is not None)
        message = (
            'clip_grad_norm_ was called, and with overlap="backward" gradients are used before'
            f" their norm is known. Use {advice}, which is exact under clipping."
        )
        raise OptionError(message)

    def check_scaling(self, factor: float, *, may_skip: bool) -> None:
        """Raise OptionError if gradients would have to be scaled or skipped after their use."""
        if may_skip or factor != 1.0:
            advice = _exact_overlaps(self._params, has_module=self._waits is not None)
            message = (
                'A GradScaler (or div_scale) was used with overlap="backward": updates by the'
                f" scaled gradients have begun. Use {advice}, or bfloat16 without a"
                " scaler."
            )
            raise OptionError(message)


def are_scalars_changed(plan: StepPlan) -> bool:
    """Return whether hyper-parameters changed since the open step of ``plan`` began."""
    groups = ((update.group, update.scale) for update in plan.updates)
    # The open step was begun with a gradient factor of 1.
    _, now = scalar_table(groups, [int(count.item()) + 1 for count in plan.counts], 1.0)
    return now != plan.scalars


def rest_waits(waits: ForwardWaits | None, plan: StepPlan) -> ForwardWaits | None:
    """Return what waits in the next forward for the rest of ``plan``; None: nothing can."""
    return None if waits is None or waits.blind or plan.commits else waits


def _exact_overlaps(params: ParamTable, *, has_module: bool) -> str:
    """Return the values of ``overlap`` that an optimizer of ``params`` could have instead."""
    if not has_module or reaches_device(params.offload_policy.update_on):
        return 'overlap="none"'
    return 'overlap="forward" or "none"'


def is_written(plan: StepPlan | None, written: Mapping[int, tuple[int, int]]) -> bool:
    """Return whether others wrote or replaced a weight of ``plan`` since ``written``."""
    updates = [] if plan is None else plan.updates
    # A read of a weight may undo the step, and this is none.
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
        return any(_written(u.param) != written[u.param.number] for u in updates)


def _written(param: ManagedParam) -> tuple[int, int]:
    """Return the version and address of a weight: one changes if it is written or replaced."""
    return param.parameter._version, param.parameter.data_ptr()  # noqa: SLF001
