"""``overlap="backward"``: updates run beside the backward that their gradients come from.

[Note: Backpressure] Where a batch is small, backward makes gradients faster than a disk moves
states, and those that wait would fill host memory: with states on disk they would be most of it.
Backward waits where more than a window of them does; the window is several times what the ring
works on, so the disk is never idle for it, and what backward loses now the step would have lost at
its end.
"""

import weakref
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from tensorstow.base.errors import OptionError
from tensorstow.io.device_link import DeviceEvent
from tensorstow.step.chunk_order import by_last
from tensorstow.step.consumed_gradients import ConsumedGradients, newest_backward
from tensorstow.step.gradient_feed import Beside
from tensorstow.step.legal_calls import LEAVE, Call, Phase, require
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.step.param_table import ParamTable
from tensorstow.step.publish import deliver, hide, shadow
from tensorstow.step.schedule import Schedule
from tensorstow.step.step_plan import States, record_step, scalars_of
from tensorstow.step.validation import refuse_scaling
from tensorstow.tensors.consumed_gradient import ConsumedGradient

WINDOW_BYTES = 64 << 20
"""Of gradients that wait for their update."""


class BackwardOverlap(Schedule):
    """``overlap="backward"``."""

    begins_early = True

    def __init__(self, params: ParamTable, gradients: ConsumedGradients, *, poison: bool) -> None:
        """``gradients`` knows which are final; ``poison`` as in ForwardOverlap."""
        super().__init__(params)
        self.gradients = gradients
        self._poison = poison
        self._plan: StepPlan | None = None
        self._written: dict[int, tuple[int, int]] = {}
        self._last_order: list[int] = []
        self._task = -1
        self._has_ended = False
        self._given_up = -1
        """The newest backward that began before the last step was given up."""

    @property
    def phase(self) -> Phase:
        """Where the optimizer is in its step ([Note: Legal calls]); USED is not told."""
        if self._plan is None:
            return Phase.BETWEEN
        if not self._has_ended and self._task == torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return Phase.RUNNING
        return Phase.OPEN if self.why_broken is None else Phase.BROKEN

    @property
    def why_broken(self) -> str | None:
        """Why the step that is open can never be a whole one; None where it can."""
        if not self._has_ended:
            return "backward has not ended (it raised, or another thread is in it)"
        if not self.gradients.untouched:
            return "a gradient was dropped or replaced (by model.zero_grad(), say) behind backward"
        plan = self._plan
        for update in [] if plan is None else plan.updates:
            if _written(update.param) != self._written[update.param.number]:
                return "a weight was written or replaced between backward and step()"
        return None

    def is_final(self, number: int) -> bool:
        """Count one more gradient of a parameter; return whether it was the last of the step."""
        return self.gradients.is_final(number)

    def is_given_up(self) -> bool:
        """Return whether the backward that calls this hook is one whose step was given up."""
        return -1 < torch._C._current_graph_task_id() <= self._given_up  # noqa: SLF001

    def break_off(self) -> None:
        """Say that a gradient was not taken as it should: the step will never be whole."""
        self._has_ended, self._task = False, -1

    def _watch_backward(self, plan: StepPlan) -> None:
        """Learn whether the backward that is running, if any, ends."""
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001
        self._has_ended = self._task == -1
        if self._has_ended:
            return
        schedule = weakref.ref(self)

        def ended() -> None:  # not called where anything has raised
            alive = schedule()
            if alive is not None and alive._plan is plan and alive._task != -1:  # noqa: SLF001
                alive._has_ended = True  # noqa: SLF001

        engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP2 does
        engine.queue_callback(ended)

    @property
    def is_open(self) -> bool:
        """Whether updates of a step have begun that ``step()`` has not ended."""
        return self._plan is not None

    def begin(self, plan: StepPlan) -> None:
        """Begin a step of which no gradient is there yet."""
        params = self._params
        pipeline = params.store.pipeline
        if not self._last_order:
            # Nothing is known of this model yet: backward mostly goes from its end to its begin.
            last_first = range(len(params) - 1, -1, -1)
            pipeline.order(by_last(params.store.chunks, last_first))
        if self._poison:
            shadow(plan)
        try:
            params.path.begin(plan, Beside.BACKWARD)
            self._written = {u.param.number: _written(u.param) for u in plan.updates}
            self._watch_backward(plan)
            self._plan = plan
        except BaseException as error:  # an interrupt: open for the pipeline, and not for us
            pipeline.poison(error)
            raise

    def on_gradient(self, param: ManagedParam) -> None:
        """Hand over the gradient of ``param``, which is final."""
        if self._plan is None:
            message = "A gradient was handed over outside of a step."
            raise OptionError(message)
        path = self._params.path

        def use(gradient: torch.Tensor, copied: DeviceEvent | None) -> None:
            # Before the weight changes: a graph that still needs the old one must not go on.
            torch.autograd.graph.increment_version(param.parameter)
            hide(param)
            self._written[param.number] = _written(param)
            path.offer(param, gradient, copied)

        try:
            self.gradients.hand_over(param.number, param.owner, use)
            self.gradients.hold_back(WINDOW_BYTES, path.wait_for_one)
        except BaseException as error:  # an interrupt: a gradient may be gone and not used
            self._params.store.pipeline.poison(error)
            self.gradients.take_back()
            raise

    @property
    def commits(self) -> bool:
        """Whether the open step commits."""
        return self._plan is not None and self._plan.commits

    def check_unchanged(self) -> None:
        """Raise OptionError where the step that is open cannot be ended as it was begun."""
        plan = self._plan
        if plan is None:
            return
        require(Call.STEP, self)
        now = scalars_of(plan.updates, plan.counts, 1.0)
        rows = [plan.rows[update.param.number].scalars for update in plan.updates]
        began = [tuple(plan.scalars[row].tolist()) for row in rows]
        if now != began:
            message = (
                "A hyper-parameter (lr, betas, eps, weight_decay, maximize) was changed between"
                ' backward and step(), and with overlap="backward" updates have begun by then.'
                f" Change it back, call step(), and change it behind that. Else {LEAVE}."
            )
            raise OptionError(message)

    def step(self, plan: StepPlan, states: States) -> None:
        """End the step that is open; ``plan`` has gradients that were not final before."""
        opened = self._plan
        if opened is None:
            message = "A step was ended that had not begun."
            raise OptionError(message)
        params, path = self._params, self._params.path
        on_time = len(self.gradients.arrived)
        for update in plan.updates:
            self.on_gradient(update.param)
        order = self.gradients.arrived
        arrived = set(order)
        pairs = [
            (update, count)
            for update, count in zip(opened.updates, opened.counts, strict=True)
            if update.param.number in arrived
        ]
        self._plan = None
        try:
            path.close()
            path.wait()
        except BaseException:
            self.gradients.take_back()  # or the next backward would add to them: another error
            params.store.pipeline.lent.append(self.gradients.held)  # they may be read still
            raise
        finally:
            self.gradients.restart()
        if order != self._last_order and on_time == len(order):
            params.store.pipeline.order(by_last(params.store.chunks, order))
            self._last_order = order
        commits = opened.commits
        ended = StepPlan([u for u, _ in pairs], [c for _, c in pairs], [], opened.scalars, commits)
        for update in opened.updates:
            if update.param.number in arrived:
                deliver(update.param)
            update.param.host = None
        record_step(ended, states)

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return: ``step()`` has waited. Raises OptionError before that, outside of backward.

        Inside, a checkpoint's forward runs again; what it reads is not updated yet, or autograd
        finds out.
        """
        del ids
        if self.is_open and torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            self._params.store.pipeline.check_alive()
            require(Call.FORWARD, self)

    def abort(self) -> None:
        """Forget the step that is open, and its gradients: its store is gone.

        Hooks of a backward that has begun, which may still come, find it given up ([Note: Hooks] in
        calls).
        """
        super().abort()
        self._given_up = newest_backward()
        self._plan = None
        self._last_order = []
        self.gradients.take_back()
        self.gradients.restart()

    @property
    def held(self) -> Sequence[torch.Tensor]:
        """Gradients that were taken out of ``.grad`` and may still be read."""
        return self.gradients.held

    @property
    def most_held_bytes(self) -> int:
        """Return the bytes of ``held`` at their most."""
        return self.gradients.most_bytes

    # --- what users do with gradients ---

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which no gradient is final."""
        return self.gradients.accumulate()

    def drop_gradients(self, parameters: Iterable[torch.Tensor], *, to_zero: bool) -> None:
        """Forget gradients of earlier micro-batches; give zeros for those that were used."""
        self.gradients.restart()
        for parameter in parameters if to_zero else ():
            if isinstance(parameter.grad, ConsumedGradient):  # it has no elements to be zeroed
                parameter.grad = torch.zeros_like(parameter)

    def check_clipping(self) -> None:
        """Raise OptionError: gradients are used before their norm is known."""
        message = (
            'clip_grad_norm_ was called, and with overlap="backward" gradients are used before'
            ' their norm is known. Use overlap="forward", which is exact under clipping.'
        )
        raise OptionError(message)

    def check_scaling(self, found_inf: torch.Tensor | None, factor: float) -> None:
        """Raise OptionError where gradients are used before they could be scaled."""
        refuse_scaling(found_inf, factor)


def _written(param: ManagedParam) -> tuple[int, int]:
    """Return what changes where the weight is written, or exchanged by ``p.data = ...``."""
    return param.parameter._version, param.parameter.data_ptr()  # noqa: SLF001
