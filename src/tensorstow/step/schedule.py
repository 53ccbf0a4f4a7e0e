"""The interface of schedules, what they share, and two of them: "none" and "forward".

[Note: Schedules] All of them take the same steps by the same path ([Note: Feeds]). They differ only
in when a weight is published. The first three publish it before it is read.

none      ``step()`` returns when every weight is new (``Synchronous``), but for rows whose updates
          are deferred ([Note: Rows] in deferred_rows).
forward   ``step()`` returns at once; a read of a weight waits for it (``ForwardOverlap``, and
          [Note: Unpublished]).
backward  a step is open while backward runs; each gradient is offered when it is final, and
          ``step()`` closes it. Where modules can wait, a read of a weight waits for what is left,
          else ``step()`` does (``BackwardOverlap``).
delayed   ``step()`` returns at once; the next forward and backward read the old weights, and the
          next ``step()`` publishes the new ones (``DelayedOverlap``).
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar, ParamSpec

import torch

from tensorstow.base.errors import StowError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.states.chunks import Chunk
from tensorstow.states.memory import StateMemory
from tensorstow.states.native_pipeline import poisoning
from tensorstow.step.forward_waits import ForwardWaits
from tensorstow.step.gradient_feed import OverlapWith
from tensorstow.step.managed_param import (
    ParamUpdate,
    StepPlan,
    fill_with_nan,
    publish_weight,
    write_to_copies,
)
from tensorstow.step.norms import KeptNorms
from tensorstow.step.param_table import ParamTable
from tensorstow.step.replaced import UpdateUnderWay, may_have_aliases, shared_elsewhere
from tensorstow.step.step_plan import States
from tensorstow.step.unpublished import Waiter, mark_published, mark_unpublished

_P = ParamSpec("_P")
logger = logging.getLogger("tensorstow")
_BLIND = (
    'overlap="forward" overlaps nothing: the model is compiled as one graph, which cannot wait for'
    " a weight while it runs, so step() returns when all are new. Compile its blocks instead,"
    " before you create the optimizer: model.layers[i] = torch.compile(model.layers[i])."
)
_SHARED = (
    "step() updates %d of %d parameters before it returns: other tensors, views or arrays share the"
    " memory of their weights or gradients, and would see the update before it is complete."
)


class Schedule:
    """Decides when the updates of one optimizer run. All but BackwardOverlap begin in ``step``."""

    waits_before_step: ClassVar[bool] = True
    """Whether all weights of the last step are new before the next one begins."""

    def __init__(self, params: ParamTable) -> None:
        self._params = params
        self._nan_until_published = params.offload_policy.policy.nan_until_published
        """Whether weights are NaN until then, so that tests detect early reads."""
        self.norms: KeptNorms | None = None
        """Norms of gradients that are used before ``step()``; None: they are not needed."""
        self.beside_backward: Callable[[], None] | None = None
        """Called with each gradient that autograd has accumulated, if none begins the step."""
        self.may_go_on = False
        """Whether a step that begins in backward may go on in the next forward."""
        self.unit_bytes = 0
        """Bytes of the gradients that a device copies down together; 0: there is no device."""

    # --- state of a step ---

    @property
    def is_open(self) -> bool:
        """Whether updates of a step have begun that ``step()`` has not ended."""
        return False

    def counted_in(self, memory: StateMemory) -> StateMemory:
        """Return ``memory`` with what the schedule holds: gradients at their peak, and weights."""
        return memory

    # --- a step ---

    def step(self, plan: StepPlan, states: States) -> None:
        """Take the step of ``plan``, or end the one that is open with the gradients of ``plan``.

        Steps are counted in ``states``, which is ``optimizer.state``.
        """
        raise NotImplementedError

    def stepping(self) -> AbstractContextManager[None]:
        """Wait for the weights that a new step needs; return a context in which it is taken."""
        if self.waits_before_step:
            self.wait()
        return nullcontext()

    def end_step(self) -> None:
        """End the step inside of ``stepping``, before its commit."""

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return once the parameters with these ids, or all, may be read."""

    def finish(self) -> None:
        """End the step under way: it is the last one."""

    def abort(self) -> None:
        """Drop the step that is open or under way: its store is closed, or has failed."""
        self._params.update_router.step_path.abort()

    # --- what users do with gradients ---

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which no gradient is final."""
        return nullcontext()

    def drop_gradients(self, parameters: Iterable[torch.Tensor], *, to_zero: bool) -> None:
        """Stop tracking gradients that are about to be dropped, or set ``to_zero``."""
        del parameters
        if to_zero:
            self.wait()  # updates may still read them

    def check_clipping(self) -> None:
        """Raise OptionError if gradients are used before their norm is known."""

    def check_scaling(self, factor: float, *, may_skip: bool) -> None:
        """Raise OptionError if gradients would have to be scaled or skipped after their use."""


class Synchronous(Schedule):
    """``overlap="none"``: updates run inside ``step()``."""

    def step(self, plan: StepPlan, states: States) -> None:
        """Return when every weight is new."""
        path = self._params.update_router.step_path
        path.begin(plan)
        with poisoning(self._params.store.pipeline):
            path.close()
            path.wait()
        record_step(plan, states)


class OngoingSchedule(Schedule):
    """Base of the schedules whose updates run on after ``step()``."""

    def __init__(self, params: ParamTable) -> None:
        super().__init__(params)
        self._has_said_shared = False
        self._under_way: dict[int, UpdateUnderWay] = {}
        """Updates whose weights are not published, by the ids of their parameters."""
        self.lock = threading.RLock()
        """Held while weights are published or put back: any thread may read one."""

    def abort(self) -> None:
        """Drop the step under way: its store is closed, or has failed."""
        super().abort()
        self._forget()

    def _hide(self, waiter: Callable[[Iterable[int]], None]) -> None:
        """Make reads of the weights of the step under way call ``waiter``."""
        call = weakly(waiter)
        for under_way in list(self._under_way.values()):  # a thread may read one of them now
            mark_unpublished(under_way.update.param.owner, call)

    @contextmanager
    def _publishing(self) -> Iterator[None]:
        """Publish weights inside the block; after an error each read of the rest raises one too."""
        # Our own operations on weights must not wait. Signals are deferred first: a handler that
        # commits waits for all weights, and may have to wait for another thread's call.
        with SignalsDeferred(), self.lock, torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            try:
                yield
            except StowError as error:  # not an interrupt, after which gradients are still read
                self._params.store.pipeline.handle.poison(error)
                raise

    def _forget(self) -> None:
        """Stop waiting for the step under way."""
        for under_way in self._under_way.values():
            for tensor in (under_way.update.param.owner, *under_way.parts):
                mark_published(tensor)
        self._under_way = {}


class UpdatesInForward(OngoingSchedule):
    """Base of the schedules whose steps go on in the next forward, where each read waits."""

    def _step_into_forward(self, plan: StepPlan, states: States, waits: ForwardWaits) -> None:
        """Take the step of ``plan``, all of whose updates run in the next forward."""
        # First: the feeds' own tensors share the memory of what they copy.
        shared = self._shared(plan.updates)
        if len(shared) > len(plan.updates) // 2 and not self._has_said_shared:
            self._has_said_shared = True
            logger.info(_SHARED, len(shared), len(plan.updates))
        if self._nan_until_published:
            write_to_copies(plan)
            for update in plan.updates:
                fill_with_nan(update.param)
        path = self._params.update_router.step_path
        path.begin(plan, OverlapWith.FORWARD)
        path.close()
        record_step(plan, states)
        self._go_on(plan.updates, waits, shared)

    def _go_on(
        self, updates: Iterable[ParamUpdate], waits: ForwardWaits, shared: Iterable[int]
    ) -> None:
        """Let reads of the weights of a closed step wait for their updates.

        New when this returns are weights for which no module waits, and those of the ids
        ``shared`` ([Note: Aliases]).
        """
        # Another thread, or a handler of a signal, may read a weight as soon as it is hidden.
        with SignalsDeferred(), self.lock, torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self._under_way = {id(u.param.owner): UpdateUnderWay(u) for u in updates}
            self._hide_parts(self.wait)
            self._hide(self.wait)
            uncovered = [*(i for i in self._under_way if not waits.covers(i)), *shared]
        if uncovered:
            self.wait(uncovered)

    def _shared(self, updates: Iterable[ParamUpdate]) -> Sequence[int]:
        """Return ids of parameters of which others may have aliases ([Note: Aliases])."""
        plain = [u for u in updates if may_have_aliases(u.param)]
        return shared_elsewhere(plain, self._params.all()) if plain else ()

    def _hide_parts(self, waiter: Callable[[Iterable[int]], None]) -> None:
        """Let uses of gradients and states in memory wait for the update that reads them."""
        call = weakly(waiter)
        for identity, under_way in self._under_way.items():
            under_way.find_parts()
            for tensor in under_way.parts:
                mark_unpublished(tensor, _waiter_for(call, identity))

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return once the parameters with these ids, or all, have their new weights."""
        self._params.update_router.step_path.join()  # also if another stream has joined
        wanted = None if ids is None else list(ids)
        under_way = self._under_way.keys()
        if not under_way:
            return
        if wanted is None or not under_way.isdisjoint(wanted):
            with self._publishing():
                self._wait(wanted)
        elif self._params.update_router.step_path.works_between_reads:
            with self._publishing():
                self._params.update_router.step_path.wait(())

    def _wait(self, ids: Iterable[int] | None) -> None:
        asked = list(self._under_way) if ids is None else dict.fromkeys(ids)
        wanted = [i for i in asked if i in self._under_way]
        if not wanted:
            return
        numbers = [self._under_way[i].update.param.number for i in wanted]
        self._params.update_router.step_path.wait(None if ids is None else numbers)
        for identity in wanted:
            self._under_way[identity].check()
            param = self._under_way[identity].update.param
            publish_weight(param)
            mark_published(param.owner)  # after the copy: another thread may read it now
            for part in self._under_way[identity].parts:
                mark_published(part)
            del self._under_way[identity]  # last: after an interrupt, all of this is repeated

    def finish(self) -> None:
        """End the step under way: it is the last one. One that is open can only be dropped.

        An error that a call has raised is not raised again.
        """
        if not self.is_open and not self._params.store.pipeline.handle.is_poisoned:
            self.wait()


class ForwardOverlap(UpdatesInForward):
    """``overlap="forward"``: updates run during the next forward, whose reads wait for them.

    With gradients on an accelerator the device feed moves on whenever a weight is waited for: the
    device still works on what is queued, so the caller's thread is free for that.
    """

    def __init__(self, params: ParamTable, waits: ForwardWaits) -> None:
        """``waits`` blocks modules until their weights are new, and records their order."""
        super().__init__(params)
        self._waits = waits
        self._last_order: tuple[int, list[int]] = (0, [])
        self._has_said = False

    def step(self, plan: StepPlan, states: States) -> None:
        """Return at once; weights and gradients stay alive until they are used.

        Weights outside of the model, for which no module waits, are new by then.
        """
        self._arrange()
        self._step_into_forward(plan, states, self._waits)
        if self._waits.blind and not self._has_said:
            self._has_said = True
            was_chosen = self._params.offload_policy.is_overlap_chosen
            logger.log(logging.INFO if was_chosen else logging.WARNING, _BLIND)

    def _arrange(self) -> None:
        # A new store does not know the order of the last one.
        order = (id(self._params.store), self._waits.order())
        if order != self._last_order:
            order_for_forward(self._params, order[1])
            self._last_order = order


def _waiter_for(waiter: Callable[[Iterable[int]], None], identity: int) -> Waiter:
    return lambda _: waiter((identity,))


def record_step(plan: StepPlan, states: States) -> None:
    """Count the step of ``plan``, and increment the version counters of its weights.

    The version counters let autograd detect graphs that were made with the old weights.
    """
    if not plan.updates:
        return
    params = [update.param for update in plan.updates]
    torch._foreach_add_(plan.counts, 1)
    torch.autograd.graph.increment_version([param.parameter for param in params])
    for param, count in zip(params, plan.counts, strict=True):
        state = states[param.owner]
        # A step that began in backward shows states only now, of parameters that got a gradient.
        if "step" not in state:
            state.update({"step": count, **param.views})
        param.begun = True
        param.remember()
        # A step that commits has copied all weights to host memory.
        if not plan.commits:
            param.mark_stale()


def weakly(method: Callable[_P, None]) -> Callable[_P, None]:
    """Return a function that calls ``method`` of an object while that is alive.

    Hooks of models and the table of unpublished weights must not keep an optimizer alive.
    """
    reference = weakref.WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, **kwargs)

    return call


def order_for_forward(params: ParamTable, ids: Iterable[int]) -> None:
    """Update first, from the next step on, what the next forward needs first.

    ``ids``: the ids of the parameters, in the order of the forward.
    """
    first = [param.number for i in ids if (param := params.by_id(i)) is not None]
    params.store.pipeline.order(by_first(params.store.chunks, first))


def by_first(chunks: Sequence[Chunk], parameters: Sequence[int]) -> list[int]:
    """Return chunk numbers by the first of their parameters in ``parameters``.

    What the next forward needs first is updated first. Parameters that are not in ``parameters``
    come last, in the order of their numbers.
    """
    return _by(min, chunks, parameters)


def by_last(chunks: Sequence[Chunk], parameters: Sequence[int]) -> list[int]:
    """Return chunk numbers by the last of their parameters in ``parameters``.

    A chunk is updated when the last of its gradients is final.
    """
    return _by(max, chunks, parameters)


def _by(
    pick: Callable[[Iterable[int]], int], chunks: Sequence[Chunk], parameters: Sequence[int]
) -> list[int]:
    rank = {number: index for index, number in enumerate(parameters)}
    keys = {c.number: pick(rank.get(p, len(rank) + p) for p in c.owners) for c in chunks}
    return sorted(keys, key=lambda number: (keys[number], number))
