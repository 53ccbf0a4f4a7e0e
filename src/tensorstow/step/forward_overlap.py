"""``overlap="forward"``: updates run during the next forward, whose reads wait for them.

With gradients on an accelerator the device feed moves on whenever a weight is waited for: the
device still works on what is queued, so the caller's thread is free for that.
"""

import logging
from collections.abc import Iterable

from tensorstow.step.forward_waits import ForwardWaits
from tensorstow.step.gradient_feed import OverlapWith
from tensorstow.step.managed_param import StepPlan, fill_with_nan, publish_weight, write_to_copies
from tensorstow.step.param_table import ParamTable
from tensorstow.step.replaced import UpdateUnderWay
from tensorstow.step.schedule import OngoingSchedule, by_first
from tensorstow.step.step_plan import States, record_step
from tensorstow.step.unpublished import mark_published

logger = logging.getLogger("tensorstow")
_BLIND = (
    'overlap="forward" overlaps nothing: the model is compiled as one graph, which cannot wait for'
    " a weight while it runs, so step() returns when all are new. Compile its blocks instead,"
    " before you create the optimizer: model.layers[i] = torch.compile(model.layers[i])."
)


class ForwardOverlap(OngoingSchedule):
    """``overlap="forward"``."""

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
        if self._nan_until_published:
            write_to_copies(plan)
            for update in plan.updates:
                fill_with_nan(update.param)
        path = self._params.update_router.step_path
        path.begin(plan, OverlapWith.FORWARD)
        path.close()
        self._under_way = {id(u.param.owner): UpdateUnderWay(u) for u in plan.updates}
        params = [update.param for update in plan.updates]
        record_step(params, plan.counts, states, commits=plan.commits)
        self._hide(self.wait)
        self.wait([i for i in self._under_way if not self._waits.covers(i)])
        if self._waits.blind and not self._has_said:
            self._has_said = True
            logger.warning(_BLIND)

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
        elif self._params.update_router.step_path.pins_weights:  # one that is new is pinned next
            with self._publishing():
                self._params.update_router.step_path.wait(())

    def _wait(self, ids: Iterable[int] | None) -> None:
        wanted = list(self._under_way) if ids is None else [i for i in ids if i in self._under_way]
        if not wanted:
            return
        numbers = [self._under_way[i].update.param.number for i in wanted]
        self._params.update_router.step_path.wait(None if ids is None else numbers)
        for identity in wanted:
            self._under_way[identity].check()
            param = self._under_way[identity].update.param
            publish_weight(param)
            mark_published(param.owner)  # after the copy: another thread may read it now
            del self._under_way[identity]  # last: after an interrupt, all of this is repeated

    def finish(self) -> None:
        """End the step under way: it is the last one."""
        self.wait()

    def _arrange(self) -> None:
        params = self._params
        order = (id(params.store), self._waits.order())
        if order != self._last_order:
            first = [param.number for i in order[1] if (param := params.by_id(i)) is not None]
            params.store.pipeline.order(by_first(params.store.chunks, first))
            self._last_order = order
