"""``overlap="speculative"``: updates run during backward; a step that becomes another is undone.

[Note: Speculation] A clip factor is known when the last gradient is. Once a run is warm it mostly
is one, and a loss scale mostly that of the step before: then the updates that ran during backward
are those of the step. Where they are not, they are undone, the gradients return to ``.grad``, and a
whole step is taken; its bits are those of a step without overlap. So is a step whose gradients or
weights are read or changed before ``step()``, as by a second micro-batch or an evaluation.

Undoing reads no states: new ones were written to a second place. The old weights are in a copy in
memory; those on disk stayed there, and are read again. A chunk whose states stay in memory has no
second place, and is not updated before the factor is known.

So it takes the weights once more, in memory or on disk, the states once more on disk, and the
gradients of all parameters until ``step()``, as clipping does anyway. A run that commits has three
places for each chunk: of the last commit, of the last step, and of the step that may be undone,
which may commit too. An undone step takes the time of one with ``overlap="forward"`` and that of
writing what was undone. So after two such steps in a row, as at the start of a run, updates wait
for ``step()`` until one would not be undone.
"""

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from tensorstow.base.signals import SignalsDeferred
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import AccumulationSteps
from tensorstow.states.memory import StateMemory
from tensorstow.states.native_pipeline import poisoning
from tensorstow.step.backward_overlap import (
    BackwardOverlap,
    are_scalars_changed,
    is_written,
    newest_backward,
    rest_waits,
)
from tensorstow.step.forward_waits import ForwardWaits
from tensorstow.step.legal_calls import PublicCall
from tensorstow.step.managed_param import ParamUpdate, StepPlan
from tensorstow.step.norms import KeptNorms
from tensorstow.step.param_table import ParamTable
from tensorstow.step.schedule import Synchronous, order_for_forward, weakly
from tensorstow.step.step_plan import States
from tensorstow.step.unpublished import mark_published, mark_unpublished

logger = logging.getLogger("tensorstow")
_MOST_IN_A_ROW = 2
"""Undone steps after which none begins in backward, until one would not be undone."""
_NEEDS_UNDONE = {
    PublicCall.FORWARD: "a weight was read",
    PublicCall.WHOLE: "states were read or changed",
}
"""Calls that an open step is undone for, and why."""


class SpeculativeOverlap(BackwardOverlap):
    """Updates of backward that ``step()`` confirms, or undoes ([Note: Speculation])."""

    can_undo = True

    def __init__(
        self,
        params: ParamTable,
        accumulation_steps: AccumulationSteps,
        waits: ForwardWaits | None = None,
        *,
        alone: bool = True,
    ) -> None:
        """``accumulation_steps`` and ``waits`` are those of ``BackwardOverlap``.

        ``alone``: whether there is one rank. All ranks begin a step at the same point, where they
        may decide on its commit, and what reads a gradient may do so on one of them.
        """
        super().__init__(params, accumulation_steps, waits)
        self._exact = Synchronous(params)
        self.gradients.holds_all = True
        self.gradients.keeper_reference = weakref.ref(self)
        self.norms = KeptNorms(params.offload_policy.policy.isa)
        self._old_weights = _OldWeights(params)
        self._undone_in_a_row = 0
        """How many of the last steps had other gradients than those of backward."""
        self._alone = alone
        self._has_logged = False
        self._is_given_up = False
        """Whether no step begins in backward any more."""
        self._must_upload = False
        """Whether an accelerator may have weights of a step that was undone."""
        self.open_number = 0
        """How many steps have begun in backward."""
        self.returned: dict[int, torch.Tensor] = {}
        """Gradients of a step that was undone, until the next one, by number."""
        self._written_by_others: set[int] = set()
        """Numbers of the parameters whose weights others had written before the open step."""
        self._is_settled = False
        """Whether ``step()`` has decided to confirm the open step: no reader undoes it."""

    def require(self, call: PublicCall) -> None:
        """Raise OptionError where ``call`` is not legal now; undo an open step that is in its way.

        ``zero_grad()`` undoes one itself.
        """
        if call in _NEEDS_UNDONE and self._is_between():
            self._undo_for_reader(f"{_NEEDS_UNDONE[call]} between backward and step()")
        if not (call is PublicCall.ZERO_GRAD and self._can_undo_now()):
            super().require(call)

    def _can_undo_now(self) -> bool:
        """Return whether a step is open that can be undone, also after a backward that has raised.

        Gradients may have been replaced since; a weight that others wrote must not be.
        """
        is_in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001
        return self.is_open and not is_in_backward and not is_written(self._plan, self.written)

    def _is_between(self) -> bool:
        """Return whether a step is open whose backward has ended, and that can be undone."""
        return self._has_ended and self._can_undo_now()

    def begin(self, plan: StepPlan) -> None:
        """Begin a step without gradients, whose updates keep the old weights."""
        self.returned = {}
        self.open_number += 1
        params = [update.param for update in plan.updates]
        # Updates change the version counters, so this is asked before they begin.
        self._written_by_others = {param.number for param in params if param.written_by_others}
        for update in plan.updates:
            if update.param.tier is not Tier.DISK:
                number = update.param.number
                row = plan.rows[number]
                plan.rows[number] = row._replace(backup=self._old_weights.of(number, row.weight))
        for param in self._params.all():
            if param.tier is Tier.DISK:  # a commit reads those without an update too
                row = plan.rows[param.number]
                plan.rows[param.number] = row._replace(keeps_weight=True)
        super().begin(plan)
        if not self._has_ended:
            schedule = weakref.ref(self)

            def hide() -> None:
                alive = schedule()
                if alive is not None:
                    alive._hide_step(plan)  # noqa: SLF001

            engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001
            engine.queue_callback(hide)  # after the one that ends backward

    def _hide_step(self, plan: StepPlan) -> None:
        """Undo the step of ``plan`` when a weight is read; now if that would be unnoticed."""
        # The feeds of an accelerator share the memory of weights that they copy up.
        on_host = [update for update in plan.updates if update.param.tier is not Tier.DEVICE]
        with SignalsDeferred(), self.lock:
            if self._plan is not plan or not self._has_ended:  # the step was aborted
                return
            _hide_weights(plan, weakly(self._undo_for_weight))
            if self._shared(on_host) and not is_written(plan, self.written):
                why = "a view or an array shares the memory of a weight"
                self._undo_for_reader(why, in_backward=True)

    def _undo_for_weight(self, _: Iterable[int]) -> None:
        """Undo the open step for a read of one of its weights.

        A second backward may have raised since.
        """
        # Callbacks of the step's own backward may be run after the one that hides weights.
        if torch._C._current_graph_task_id() == self._task != -1:  # noqa: SLF001
            return
        self._undo_for_reader(f"{_NEEDS_UNDONE[PublicCall.FORWARD]} between backward and step()")
        if not self._is_settled:
            super().require(PublicCall.FORWARD)

    def abort(self) -> None:
        """Drop the open step, its gradients and the old weights: others may follow."""
        _show_weights(self._plan)
        super().abort()
        self._old_weights.memory.clear()
        self.returned = {}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Return a context in which a step is taken; if none is, old weights go up."""
        try:
            yield
        finally:
            self._is_settled = False
            if self._plan is not None:  # an error was raised before the step was taken
                _hide_weights(self._plan, weakly(self._undo_for_weight))
            if self._must_upload and not self._params.store.pipeline.handle.is_poisoned:
                self._params.update_router.upload()
                self._must_upload = False

    def step(self, plan: StepPlan, states: States) -> None:
        """Confirm the updates of the open step, and end it; or take the whole step of ``plan``.

        What is left of a step runs in the next forward, where modules wait for it.
        """
        self.returned = {}
        if self.is_open:
            super().step(plan, states)  # closing the step confirms it
            return
        self._must_upload = False
        waits = rest_waits(self._waits, plan) if self.may_go_on else None
        with poisoning(self._params.store.pipeline):
            if waits is None:
                self._exact.step(plan, states)
            else:
                order_for_forward(self._params, waits.order())
                self._last_order = []  # the order of backward is set again
                self._step_into_forward(plan, states, waits)
        self.gradients.restart()  # fewer micro-batches than usual may have been counted

    def settle(self, factor: float, divisor: float, scale: float, *, is_skipped: bool) -> None:
        """Undo the open step, if any, unless its updates are those of the step that is taken now.

        The outcome decides when the next step begins.

        Args:
            factor: What clipping multiplies the gradients by.
            divisor: What divides them.
            scale: What divides them too, before that: the scale of a GradScaler.
            is_skipped: Whether no update is made.
        """
        # A thread that reads a gradient or weight may be undoing the step.
        with SignalsDeferred(), self.lock:
            # Divided by both at once, gradients would be rounded once instead of twice.
            is_exact = factor == 1.0 and 1.0 in {scale, divisor} and not is_skipped
            scale = divisor if scale == 1.0 else scale
            is_exact = is_exact and scale == self.scale
            plan = self._plan
            if plan is not None and not (
                is_exact and self.gradients.has_placeholders and not are_scalars_changed(plan)
            ):
                if not self._is_between():
                    self.require(PublicCall.STEP)
                # A weight whose gradient was taken away has no update that would replace a new one.
                self.undo(uploads=is_skipped or not self.gradients.has_placeholders)
            self.scale = scale
            self._undone_in_a_row = 0 if is_exact else self._undone_in_a_row + 1
            self.begins_now = not self._is_given_up and self._undone_in_a_row < _MOST_IN_A_ROW
            self._is_settled = self._plan is not None
            _show_weights(self._plan)

    def undo(self, *, uploads: bool) -> None:
        """End the open step as if it had never begun; its gradients are in ``.grad`` again.

        ``uploads``: old weights go to an accelerator now; else the step that follows replaces them.
        """
        # Our own operations on weights are no reads.
        no_reads = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001
        # Any thread may read a gradient that is given back.
        with SignalsDeferred(), self.lock, no_reads, poisoning(self._params.store.pipeline):
            opened = self._plan
            if opened is None:
                return
            self._params.update_router.step_path.undo()
            self._must_upload = not uploads
            if uploads:
                self._params.update_router.upload()
            for update in opened.updates:
                _restore_hidden(update)
                param = update.param
                # The old weights are ours, though updates have changed their version counters.
                if param.number not in self._written_by_others:
                    param.remember()
                elif param.tier is Tier.DEVICE:
                    param.on_host.remember()
            _show_weights(self._plan)  # after the copies: another thread may read one now
            self._plan = None
            self.returned = self.gradients.give_back()
            self._last_order = []  # a whole step has another

    # --- gradients that were used ---

    def give_back(self) -> None:
        """Undo the open step, if it can be undone now, and give its gradients back."""
        if self._is_between():
            self._undo_for_reader("a gradient was read or changed between backward and step()")

    def are_finite(self) -> bool:
        """Return whether no gradient of the open step has an inf or NaN."""
        return self.norms is None or all(map(math.isfinite, self.norms.all().values()))

    def _undo_for_reader(self, why: str, *, in_backward: bool = False) -> None:
        """Undo the open step for what reads or changes a gradient or a weight; say so once.

        ``in_backward``: the caller is the last function of its backward.
        """
        with SignalsDeferred(), self.lock:
            if self._is_settled or not (in_backward or self._can_undo_now()):
                return
            self.undo(uploads=True)
            if self._alone:  # it does so in each step, most likely
                self._is_given_up, self.begins_now = True, False
                self._old_weights.free()
        if not self._has_logged:
            self._has_logged = True
            logger.info(
                'overlap="speculative": updates of backward were undone, as %s, and run after'
                " step(). For several backward passes per step set accumulation_steps=; to clip"
                " use optimizer.clip_grad_norm_().",
                why,
            )

    def drop_gradients(self, parameters: Iterable[torch.Tensor], *, to_zero: bool) -> None:
        """Undo the open step, if any, and drop its gradients."""
        if self.is_open:
            self._give_up()
        self.returned = {}
        super().drop_gradients(parameters, to_zero=to_zero)

    def finish(self) -> None:
        """End the step under way: it is the last one. One that is open is undone."""
        if not self._params.store.pipeline.handle.is_poisoned and self._can_undo_now():
            self._give_up()
        _show_weights(self._plan)
        super().finish()

    def _give_up(self) -> None:
        """Undo the open step, whose gradients nobody needs."""
        self._given_up = newest_backward()  # of one that has raised, hooks may still run
        self.undo(uploads=True)
        self.returned = {}

    def counted_in(self, memory: StateMemory) -> StateMemory:
        """Return ``memory`` with the peak bytes of gradients, and the copies of weights."""
        copies = self._old_weights.nbytes
        counted = super().counted_in(memory)
        return replace(counted, host_weight_bytes=memory.host_weight_bytes + copies)

    def check_clipping(self) -> None:
        """Allow clipping; pass gradients on as they arrive, whose norms the caller waits for."""
        no_reads = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001
        with SignalsDeferred(), self.lock, no_reads:
            if not self.is_open:
                return
            super().require(PublicCall.STEP)
            with poisoning(self._params.store.pipeline):
                self._params.update_router.step_path.pass_on()


class _OldWeights:
    """Memory for the weights in memory as they were before the open step."""

    def __init__(self, params: ParamTable) -> None:
        self._params = params
        self.memory: dict[int, torch.Tensor] = {}
        """One block for each parameter, by its number."""

    def of(self, number: int, weight: torch.Tensor | None) -> torch.Tensor | None:
        """Return memory for the old ``weight`` of a parameter; None: it has no weight."""
        old = self.memory.get(number)
        if weight is not None and (old is None or not _fits(old, weight)):
            old = torch.empty(weight.numel(), dtype=weight.dtype, device="cpu")
            self.memory[number] = old
            # Native threads may write to it until the pipeline is closed.
            self._params.store.pipeline.memory.append(old)
        return old

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks."""
        return sum(old.nbytes for old in self.memory.values())

    def free(self) -> None:
        """Give the blocks back: no step begins in backward any more."""
        held = self._params.store.pipeline.memory
        held[:] = [block for block in held if not any(block is o for o in self.memory.values())]
        self.memory = {}


def _fits(old: torch.Tensor, weight: torch.Tensor) -> bool:
    return old.numel() == weight.numel() and old.dtype == weight.dtype


def _hide_weights(plan: StepPlan, undo: Callable[[Iterable[int]], None]) -> None:
    """Have reads of weights in memory call ``undo`` first."""
    for update in plan.updates:
        if update.param.tier is not Tier.DISK:
            mark_unpublished(update.param.owner, undo)


def _show_weights(plan: StepPlan | None) -> None:
    """Let weights of the open step, if any, be read."""
    for update in () if plan is None else plan.updates:
        mark_published(update.param.owner)


@torch.no_grad()
def _restore_hidden(update: ParamUpdate) -> None:
    """Copy the old weight back that ``nan_until_published`` has hidden."""
    param = update.param
    if param.host is not None and param.host_weight is None:
        param.parameter.copy_(param.host)
    param.host = None
