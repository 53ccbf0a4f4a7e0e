"""``overlap="forward"``: updates run beside the next forward, whose reads wait for them.

With gradients on an accelerator the device feed moves on whenever a weight is waited for: what the
device computes meanwhile was given to it before, so the caller's thread is free for that.
"""

import logging
import threading
import weakref
from collections.abc import Iterable

import torch

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.step.chunk_order import by_first
from tensorstow.step.forward_waits import ForwardWaits
from tensorstow.step.gradient_feed import OverlapWith
from tensorstow.step.managed_param import ParamUpdate, StepPlan
from tensorstow.step.param_table import ParamTable
from tensorstow.step.publish import fill_with_nan, publish_weight, write_to_copies
from tensorstow.step.replaced import WeightMemory
from tensorstow.step.schedule import Schedule
from tensorstow.step.step_plan import States, record_step
from tensorstow.step.unpublished import Waiter, mark_published, mark_unpublished

logger = logging.getLogger("tensorstow")
_BLIND = (
    'overlap="forward" overlaps nothing: the model is compiled as a whole, in the middle of which'
    " no weight can be waited for, so step() returns when all are new. Compile its blocks instead,"
    " before the optimizer is made: model.layers[i] = torch.compile(model.layers[i])."
)


class ForwardOverlap(Schedule):
    """``overlap="forward"``."""

    def __init__(
        self, params: ParamTable, waits: ForwardWaits, *, nan_until_published: bool
    ) -> None:
        """``waits`` blocks modules until their weights are new, and records their order.

        ``nan_until_published``: weights are NaN until then, so that tests detect early reads.
        """
        super().__init__(params)
        self._waits = waits
        self._nan_until_published = nan_until_published
        self._last_order: tuple[int, list[int]] = (0, [])
        self._under_way: dict[int, ParamUpdate] = {}
        self._versions: dict[int, int] = {}
        self._has_said = False
        self._lock = threading.RLock()  # any thread may read a weight
        self._weight_memory: dict[int, WeightMemory] = {}

    def step(self, plan: StepPlan, states: States) -> None:
        """Return at once; weights and gradients stay alive until they are used.

        Weights outside of the model, for which no module waits, are new by then.
        """
        path = self._params.update_router.step_path
        self._arrange()
        if self._nan_until_published:
            write_to_copies(plan)
            for update in plan.updates:
                fill_with_nan(update.param)
        path.begin(plan, OverlapWith.FORWARD)
        path.close()
        self._under_way = {id(update.param.owner): update for update in plan.updates}
        self._versions = {i: _version(update) for i, update in self._under_way.items()}
        self._weight_memory = {
            i: WeightMemory.of(update.param) for i, update in self._under_way.items()
        }
        managed = [update.param for update in plan.updates]
        record_step(managed, plan.counts, states, commits=plan.commits)
        waiter = self._make_waiter()
        for update in plan.updates:
            mark_unpublished(update.param.owner, waiter)
        self.wait([i for i in self._under_way if not self._waits.covers(i)])
        if self._waits.blind and not self._has_said:
            self._has_said = True
            logger.warning(_BLIND)

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return once the parameters with these ids, or all, have their new weights."""
        self._params.update_router.step_path.join()  # also if another stream has joined
        wanted = None if ids is None else list(ids)
        under_way = self._under_way.keys()
        if not under_way or (wanted is not None and under_way.isdisjoint(wanted)):
            return
        # What we do with weights ourselves waits for nothing. Signals are the outer ones: a handler
        # that commits waits for all, and may have to wait for another thread's call.
        with SignalsDeferred(), self._lock, torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self._wait(wanted)

    def _wait(self, ids: Iterable[int] | None) -> None:
        wanted = list(self._under_way) if ids is None else [i for i in ids if i in self._under_way]
        if not wanted:
            return
        numbers = [self._under_way[i].param.number for i in wanted]
        try:
            self._params.update_router.step_path.wait(None if ids is None else numbers)
        except StowError:  # an interrupt leaves it all under way: gradients are still read
            self._forget()  # the pipeline is poisoned, and no gradient is being read
            raise
        for identity in wanted:
            update = self._under_way[identity]
            try:
                self._check_gradient(update, identity)
                self._weight_memory[identity].check(update.param)
            except StowError as error:
                self._forget()
                self._params.store.pipeline.poison(error)
                raise
            publish_weight(update.param)
            mark_published(update.param.owner)  # last: another thread may read it now
            del self._under_way[identity]  # last: an interrupt before has it done once more
        if not self._under_way:
            self._weight_memory.clear()

    def _check_gradient(self, update: ParamUpdate, identity: int) -> None:
        if _version(update) != self._versions[identity]:
            raise _changed_while_used()

    def finish(self) -> None:
        """End the step under way: it is the last one."""
        self.wait()

    def abort(self) -> None:
        """Drop the step under way: its store is closed, or has failed."""
        super().abort()
        self._forget()

    def _forget(self) -> None:
        for update in self._under_way.values():
            mark_published(update.param.owner)
        self._under_way.clear()
        self._weight_memory.clear()

    def _make_waiter(self) -> Waiter:
        # Weakly: the table of unpublished weights is global, and must not keep the optimizer alive.
        method = weakref.WeakMethod(self.wait)

        def wait(ids: Iterable[int]) -> None:
            alive = method()
            if alive is not None:
                alive(ids)

        return wait

    def _arrange(self) -> None:
        params = self._params
        order = (id(params.store), self._waits.order())
        if order != self._last_order:
            first = [param.number for i in order[1] if (param := params.by_id(i)) is not None]
            params.store.pipeline.order(by_first(params.store.chunks, first))
            self._last_order = order


def _version(update: ParamUpdate) -> int:
    return 0 if update.gradient is None else update.gradient._version  # noqa: SLF001


def _changed_while_used() -> OptionError:
    message = (
        "A gradient was changed in place between step() and the forward that waits for its update"
        " (by model.zero_grad(set_to_none=False), say), and the update was still reading it. Use"
        " optimizer.zero_grad(), set_to_none=True, or call optimizer.wait() before."
    )
    return OptionError(message)
