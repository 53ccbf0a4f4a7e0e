"""When updates run: before ``step()`` returns, beside the next forward, or beside backward.

[Note: Schedules] All three hand the same rows to the same pipeline, so they differ in when a weight
is published and in nothing else.

none      ``step()`` returns when every weight is new.
forward   ``step()`` returns at once; whoever reads a weight waits for it (``ForwardWaits``, and
          [Note: Unpublished]).
backward  a step is open while backward runs; each gradient is handed over when it is final, and
          ``step()`` closes it and waits for the rest.

[Note: Carried] Gradients on an accelerator reach the pipeline through the ferry, so their step is
an open one under every schedule. With "forward" the ferry moves on whenever a weight is waited for:
what the device computes meanwhile was given to it before, so the caller's thread is free for that.
"""

import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.states.native_pipeline import StepKind, UpdatePipeline
from tensorstow.step.backpressure import WINDOW_BYTES, Backpressure
from tensorstow.step.backward_overlap import ConsumedGradients, newest_backward
from tensorstow.step.chunk_order import by_first, by_last
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.disk_feed import DiskFeed, lend
from tensorstow.step.forward_overlap import ForwardWaits
from tensorstow.step.legal_calls import LEAVE, Call, Phase, require
from tensorstow.step.outside import run_on_device
from tensorstow.step.param_table import ManagedParam, ParamTable
from tensorstow.step.publish import deliver, hide, shadow
from tensorstow.step.replaced import Given
from tensorstow.step.step_plan import ParamUpdate, States, StepPlan, record_step, scalars_of
from tensorstow.step.unpublished import Waiter, publish, withhold
from tensorstow.tensors.dtensor import Arrival, gradient_on_its_way, has_left

logger = logging.getLogger("tensorstow")
_BLIND = (
    'overlap="forward" overlaps nothing: the model is compiled as a whole, in the middle of which'
    " no weight can be waited for, so step() returns when all are new. Compile its blocks instead,"
    " before the optimizer is made: model.layers[i] = torch.compile(model.layers[i])."
)


def carry(plan: StepPlan, device_feed: DeviceFeed | None) -> bool:
    """Give the gradients that are on an accelerator to the ferry; return whether there are any.

    The pipeline has begun an open step; ``device_feed.end`` ends it.
    """
    updates = [update for update in plan.updates if update.param.host_weight is not None]
    if device_feed is None or not updates:
        return False
    device_feed.open(update.param.number for update in updates)
    made = device_feed.link.record_event()
    for update in updates:
        if update.gradient is not None:
            left = has_left(update.param.owner)
            device_feed.offer(update.param.number, update.gradient, None if left else made)
    return True


def is_carried(plan: StepPlan) -> bool:
    """Return whether any gradient of the step is on an accelerator."""
    return any(update.param.host_weight is not None for update in plan.updates)


def hand_over_lent(plan: StepPlan, disk_feed: DiskFeed) -> None:
    """Hand over the gradients whose weights are on disk, chunk by chunk."""
    for update in plan.updates:
        if update.param.pager is not None and update.gradient is not None:
            disk_feed.offer(update.param, update.gradient)
    disk_feed.close()


class Synchronous:
    """``overlap="none"``."""

    phase = Phase.BETWEEN
    why_broken = None

    def __init__(self) -> None:
        """Begin with nothing under way."""
        self._disk_feed: DiskFeed | None = None

    def run(self, plan: StepPlan, params: ParamTable, states: States) -> None:
        """Return when every weight is new."""
        if params.sides is not None:
            run_on_device(plan, params, states, params.sides)
            return
        pipeline, device_feed = params.store.pipeline, params.device_feed
        disk_feed = self._disk_feed = lend(params, plan.rows, captures=plan.commits)
        is_open = disk_feed is not None or is_carried(plan)
        pipeline.step(plan.rows, plan.scalars, StepKind(open=is_open, capture=plan.commits))
        if is_open:
            try:
                carried = carry(plan, device_feed)
                if disk_feed is not None:
                    hand_over_lent(plan, disk_feed)
                if carried and device_feed is not None:
                    device_feed.end()
                    params.finish()
                else:
                    pipeline.close_step()
                pipeline.wait_published()
                if disk_feed is not None:
                    disk_feed.end_all()
            except BaseException as error:
                pipeline.poison(error)
                raise
        self._disk_feed = None
        record_step(plan, states)
        for update in plan.updates:
            deliver(update.param)

    def wait(self, params: ParamTable, ids: Iterable[int] | None = None) -> None:
        """Return: nothing is ever under way."""

    def finish(self, params: ParamTable) -> None:
        """Return, as ``wait`` does."""

    def give_up(self) -> None:
        """End what a failed step was lent: its store is gone."""
        disk_feed, self._disk_feed = self._disk_feed, None
        if disk_feed is not None:
            disk_feed.end_all()


class ForwardOverlap:
    """``overlap="forward"``."""

    phase = Phase.BETWEEN
    """Whatever is under way is waited for."""
    why_broken = None

    def __init__(self, waits: ForwardWaits, *, poison: bool) -> None:
        """Take from ``waits`` who waits for what, and what the last forward needed first.

        ``poison``: weights are NaN until they are published, so that tests see who reads them.
        """
        self._waits = waits
        self._poison = poison
        self._last_order: tuple[int, list[int]] = (0, [])
        self._under_way: dict[int, ParamUpdate] = {}
        self._versions: dict[int, int] = {}
        self._has_said = False
        self._lock = threading.RLock()  # any thread may read a weight
        self._given: dict[int, Given] = {}

    def run(self, plan: StepPlan, params: ParamTable, states: States) -> None:
        """Return at once; weights and gradients stay alive until they are used.

        Weights that nobody can wait for, for they are outside of the model, are new by then.
        """
        self._arrange(params)
        pipeline = params.store.pipeline
        if self._poison:
            shadow(plan)
            for update in plan.updates:
                hide(update.param)
        if any(param.pager is not None for param in params.all()):
            message = (
                'overlap="forward" was asked for with parameters on disk, whose memory is let go of'
                ' before the next forward. Use "backward" or "none".'
            )
            raise OptionError(message)
        carried = is_carried(plan)
        kind = StepKind(carried, plan.commits, background=not carried, home_first=True)
        pipeline.step(plan.rows, plan.scalars, kind)
        if carry(plan, params.device_feed) and params.device_feed is not None:
            params.device_feed.end()
            if plan.commits:
                params.finish()  # the thread that commits cannot move the ferry on
        self._under_way = {id(update.param.owner): update for update in plan.updates}
        self._versions = {i: _version(update) for i, update in self._under_way.items()}
        self._given = {i: Given.of(update.param) for i, update in self._under_way.items()}
        record_step(plan, states)
        waiter = self._make_waiter(params)
        for update in plan.updates:
            withhold(update.param.owner, waiter)
        self.wait(params, [i for i in self._under_way if not self._waits.covers(i)])
        if self._waits.blind and not self._has_said:
            self._has_said = True
            logger.warning(_BLIND)

    def wait(self, params: ParamTable, ids: Iterable[int] | None = None) -> None:
        """Return once the parameters with these ids, or all, have their new weights."""
        params.join()  # also where another stream has waited for the same weights
        wanted = None if ids is None else list(ids)
        under_way = self._under_way.keys()
        if not under_way or (wanted is not None and under_way.isdisjoint(wanted)):
            return
        # What we do with weights ourselves waits for nothing. Signals are the outer ones: a handler
        # that commits waits for all, and may have to wait for another thread's call.
        with SignalsDeferred(), self._lock, torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self._wait(params, wanted)

    def _wait(self, params: ParamTable, ids: Iterable[int] | None) -> None:
        wanted = list(self._under_way) if ids is None else [i for i in ids if i in self._under_way]
        if not wanted:
            return
        numbers = [self._under_way[i].param.number for i in wanted]
        try:
            params.finish(None if ids is None else numbers)
            if ids is None:
                params.store.pipeline.wait_published()
            else:
                params.store.pipeline.wait_parameters(numbers)
        except StowError:  # an interrupt leaves it all under way: gradients are still read
            self.give_up()  # the pipeline is poisoned, and no gradient is being read
            raise
        for identity in wanted:
            update = self._under_way[identity]
            try:
                self._check_gradient(update, identity)
                self._given[identity].check(update.param)
            except StowError as error:
                self.give_up()
                params.store.pipeline.poison(error)
                raise
            deliver(update.param)
            publish(update.param.owner)  # behind that: another thread may read it from here on
            del self._under_way[identity]  # last: an interrupt before has it done once more
        if not self._under_way:
            self._given.clear()

    def _check_gradient(self, update: ParamUpdate, identity: int) -> None:
        if _version(update) != self._versions[identity]:
            raise _changed_while_used()

    def finish(self, params: ParamTable) -> None:
        """End the step that is under way: no more will come."""
        self.wait(params)

    def give_up(self) -> None:
        """Forget the step that is under way: its store is gone, or has failed."""
        for update in self._under_way.values():
            publish(update.param.owner)
        self._under_way.clear()
        self._given.clear()

    def _make_waiter(self, params: ParamTable) -> Waiter:
        # Weakly: the model may hold its optimizer, and weights under way are known to everybody.
        method, managed = weakref.WeakMethod(self.wait), weakref.ref(params)

        def wait(ids: Iterable[int]) -> None:
            alive, held = method(), managed()
            if alive is not None and held is not None:
                alive(held, ids)

        return wait

    def _arrange(self, params: ParamTable) -> None:
        order = (id(params.store), self._waits.order())
        if order != self._last_order:
            managed = [m for i in order[1] if (m := params.by_id(i)) is not None]
            params.store.pipeline.order(by_first(params.store.chunks, [m.number for m in managed]))
            self._last_order = order


@dataclass(frozen=True, slots=True)
class _Falling:
    """A gradient of a parameter in host memory, which is there or comes from the device."""

    param: ManagedParam
    gradient: torch.Tensor
    mark: Arrival | None
    """Behind which it is there; None: it is."""

    @property
    def is_down(self) -> bool:
        return self.mark is None or self.mark.query()


class BackwardOverlap:
    """``overlap="backward"``."""

    def __init__(self, landed: ConsumedGradients, *, poison: bool) -> None:
        """``landed`` knows which gradients are final; ``poison`` as in BesideForward."""
        self.landed = landed
        self._poison = poison
        self._plan: StepPlan | None = None
        self._disk_feed: DiskFeed | None = None
        self._backpressure: Backpressure | None = None
        self._falling: deque[_Falling] = deque()
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
        if not self.landed.untouched:
            return "a gradient was dropped or replaced (by model.zero_grad(), say) behind backward"
        plan = self._plan
        for update in [] if plan is None else plan.updates:
            if _written(update.param) != self._written[update.param.number]:
                return "a weight was written or replaced between backward and step()"
        return None

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

    def open(self, plan: StepPlan, params: ParamTable) -> None:
        """Begin a step of which no gradient is there yet."""
        if not self._last_order:
            # Nothing is known of this model yet: backward mostly goes from its end to its begin.
            last_first = range(len(params) - 1, -1, -1)
            params.store.pipeline.order(by_last(params.store.chunks, last_first))
        if self._poison:
            shadow(plan)
        kind = StepKind(open=True, capture=plan.commits, background=not is_carried(plan))
        try:
            self._disk_feed = lend(params, plan.rows, captures=plan.commits)
            params.store.pipeline.step(plan.rows, plan.scalars, kind)
            if params.device_feed is not None:
                params.device_feed.open(update.param.number for update in plan.updates)
            if params.device_feed is None:  # which holds few gradients on the host at once
                update = [update.param.number for update in plan.updates]
                self._backpressure = Backpressure(
                    params.store.pipeline, params.store.chunks, update
                )
            managed = [update.param for update in plan.updates]
            self._written = {m.number: _written(m) for m in managed}
            self._watch_backward(plan)
            self._plan = plan
        except BaseException as error:  # an interrupt: open for the pipeline, and not for us
            params.store.pipeline.poison(error)
            raise

    def land(self, param: ManagedParam, params: ParamTable) -> None:
        """Hand over the gradient of ``param``, which is final."""
        plan = self._plan
        if plan is None:
            message = "A gradient was handed over outside of a step."
            raise OptionError(message)
        pipeline = params.store.pipeline
        _, fall = gradient_on_its_way(param.owner)

        def start(gradient: torch.Tensor) -> None:
            # Before the weight changes: a graph that still needs the old one must not go on.
            torch.autograd.graph.increment_version(param.parameter)
            hide(param)
            self._written[param.number] = _written(param)
            if param.host_weight is None or params.device_feed is None:
                self._falling.append(_Falling(param, gradient, fall))
            else:
                device_feed = params.device_feed
                device_feed.offer(param.number, gradient, device_feed.link.record_event())
                device_feed.move_on()

        try:
            self.landed.hand_over(param.number, param.owner, start)
            self._land_fallen(pipeline)
            if self._backpressure is not None:
                self.landed.hold_back(WINDOW_BYTES, partial(self._wait_for_one, pipeline))
        except BaseException as error:  # an interrupt: a gradient may be gone and not used
            pipeline.poison(error)
            self.landed.take_back()
            raise

    def _land_fallen(self, pipeline: UpdatePipeline, *, wait: bool = False) -> None:
        """Give the pipeline the gradients that are in host memory by now, or all that come."""
        while self._falling and (wait or self._falling[0].is_down):
            self._land_first(pipeline)

    def _land_first(self, pipeline: UpdatePipeline) -> None:
        falling = self._falling.popleft()
        if falling.mark is not None:
            falling.mark.synchronize()
        number = falling.param.number
        if self._disk_feed is not None:
            self._disk_feed.land(falling.param, falling.gradient)
        else:
            pipeline.land(number, falling.gradient)
        if self._backpressure is not None:
            self._backpressure.landed(number)

    def _wait_for_one(self, pipeline: UpdatePipeline, numbers: Sequence[int]) -> bool:
        """Return when one gradient more is used, or there; False: none can be."""
        if self._backpressure is not None and self._backpressure.wait_for_one(numbers):
            return True
        if not self._falling:
            return False
        self._land_first(pipeline)
        return True

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

    def end(self, late: Iterable[ManagedParam], params: ParamTable, states: States) -> None:
        """End the step that is open; ``late`` have gradients that were not final before."""
        opened = self._plan
        if opened is None:
            message = "A step was ended that had not begun."
            raise OptionError(message)
        pipeline = params.store.pipeline
        on_time = len(self.landed.arrived)
        for param in late:
            self.land(param, params)
        arrived = set(self.landed.arrived)
        pairs = [
            (update, count)
            for update, count in zip(opened.updates, opened.counts, strict=True)
            if update.param.number in arrived
        ]
        order = self.landed.arrived
        self._plan = None
        try:
            self._land_fallen(pipeline, wait=True)
            if self._disk_feed is not None:
                self._disk_feed.close()
            if params.device_feed is None:
                pipeline.close_step()
            else:
                params.device_feed.end()
                params.finish()
            pipeline.wait_published()
            if self._disk_feed is not None:
                self._disk_feed.end_all()
                self._disk_feed = None
        except BaseException:
            self.landed.take_back()  # or the next backward would add to them, and that be the error
            pipeline.lent.append(self.landed.held)  # they may be read still
            raise
        finally:
            self.landed.restart()
        if order != self._last_order and on_time == len(order):
            pipeline.order(by_last(params.store.chunks, order))
            self._last_order = order
        ended = StepPlan([d for d, _ in pairs], [c for _, c in pairs], [], opened.scalars)
        for update in opened.updates:
            if update.param.number in arrived:
                deliver(update.param)
            update.param.host = None
        record_step(ended, states)

    def wait(self, params: ParamTable, ids: Iterable[int] | None = None) -> None:
        """Return: ``step()`` has waited. Raises OptionError before that, outside of backward.

        Inside, a checkpoint's forward runs again; what it reads is not updated yet, or autograd
        finds out.
        """
        del ids
        if self.is_open and torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            params.store.pipeline.check_alive()
            require(Call.FORWARD, self)

    def finish(self, params: ParamTable) -> None:
        """Return: a step without its ``step()`` is given up."""

    def give_up(self) -> None:
        """Forget the step that is open, and its gradients: its store is gone.

        Ends what the step was lent, and what one that failed was. Hooks of a backward that has
        begun, which may still come, find it given up ([Note: Hooks] in calls).
        """
        self._given_up = newest_backward()
        self._plan = None
        self._falling.clear()
        disk_feed, self._disk_feed = self._disk_feed, None
        if disk_feed is not None:
            disk_feed.end_all()
        self._last_order = []
        self.landed.take_back()
        self.landed.restart()


def _written(param: ManagedParam) -> tuple[int, int]:
    """Return what changes where the weight is written, or exchanged by ``p.data = ...``."""
    return param.parameter._version, param.parameter.data_ptr()  # noqa: SLF001


def _version(update: ParamUpdate) -> int:
    return 0 if update.gradient is None else update.gradient._version  # noqa: SLF001


def _changed_while_used() -> OptionError:
    message = (
        "A gradient was changed in place between step() and the forward that waits for its update"
        " (by model.zero_grad(set_to_none=False), say), and the update was still reading it. Use"
        " optimizer.zero_grad(), set_to_none=True, or call optimizer.wait() before."
    )
    return OptionError(message)
