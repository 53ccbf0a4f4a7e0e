"""``overlap="forward"``: updates run during the next forward, whose reads wait for them.

With gradients on an accelerator the device feed moves on whenever a weight is waited for: the
device still works on what is queued, so the caller's thread is free for that.
"""

import logging
import threading
from collections.abc import Iterable

import torch

from tensorstow.base.errors import StowError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.step.chunk_order import by_first
from tensorstow.step.forward_waits import ForwardWaits
from tensorstow.step.gradient_feed import OverlapWith
from tensorstow.step.managed_param import StepPlan, fill_with_nan, publish_weight, write_to_copies
from tensorstow.step.param_table import ParamTable
from tensorstow.step.replaced import UpdateUnderWay
from tensorstow.step.schedule import Schedule
from tensorstow.step.step_plan import States, record_step
from tensorstow.step.unpublished import mark_published, mark_unpublished, weakly

logger = logging.getLogger("tensorstow")
_BLIND = (
    'overlap="forward" overlaps nothing: the model is compiled as one graph, which cannot wait for'
    " a weight while it runs, so step() returns when all are new. Compile its blocks instead,"
    " before you create the optimizer: model.layers[i] = torch.compile(model.layers[i])."
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
        self._under_way: dict[int, UpdateUnderWay] = {}
        self._has_said = False
        self._lock = threading.RLock()  # any thread may read a weight

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
        self._under_way = {id(u.param.owner): UpdateUnderWay(u) for u in plan.updates}
        managed = [update.param for update in plan.updates]
        record_step(managed, plan.counts, states, commits=plan.commits)
        waiter = weakly(self.wait)
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
        # Our own operations on weights must not wait. Signals are deferred first: a handler that
        # commits waits for all weights, and may have to wait for another thread's call.
        with SignalsDeferred(), self._lock, torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self._wait(wanted)

    def _wait(self, ids: Iterable[int] | None) -> None:
        wanted = list(self._under_way) if ids is None else [i for i in ids if i in self._under_way]
        if not wanted:
            return
        numbers = [self._under_way[i].update.param.number for i in wanted]
        try:
            self._params.update_router.step_path.wait(None if ids is None else numbers)
        except StowError:  # not an interrupt, after which gradients are still read
            self._forget()  # the pipeline is poisoned, and no gradient is being read
            raise
        for identity in wanted:
            try:
                self._under_way[identity].check()
            except StowError as error:
                self._forget()
                self._params.store.pipeline.poison(error)
                raise
            param = self._under_way[identity].update.param
            publish_weight(param)
            mark_published(param.owner)  # after the copy: another thread may read it now
            del self._under_way[identity]  # last: after an interrupt, all of this is repeated

    def finish(self) -> None:
        """End the step under way: it is the last one."""
        self.wait()

    def abort(self) -> None:
        """Drop the step under way: its store is closed, or has failed."""
        super().abort()
        self._forget()

    def _forget(self) -> None:
        for under_way in self._under_way.values():
            mark_published(under_way.update.param.owner)
        self._under_way.clear()

    def _arrange(self) -> None:
        params = self._params
        order = (id(params.store), self._waits.order())
        if order != self._last_order:
            first = [param.number for i in order[1] if (param := params.by_id(i)) is not None]
            params.store.pipeline.order(by_first(params.store.chunks, first))
            self._last_order = order
