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
from tensorstow.step.backpressure import WINDOW_BYTES, Pace
from tensorstow.step.backward_overlap import LandedGradients, newest_backward
from tensorstow.step.chunk_order import by_first, by_last
from tensorstow.step.device_feed import Ferry
from tensorstow.step.disk_feed import Leases, lend
from tensorstow.step.forward_overlap import ForwardWaits
from tensorstow.step.legal_calls import LEAVE, Call, Phase, require
from tensorstow.step.outside import run_on_device
from tensorstow.step.param_table import Member, Members
from tensorstow.step.publish import deliver, hide, shadow
from tensorstow.step.replaced import Given
from tensorstow.step.step_plan import Due, States, Turn, account, scalars_of
from tensorstow.step.unpublished import Waiter, publish, withhold
from tensorstow.tensors.dtensor import Arrival, gradient_on_its_way, has_left

logger = logging.getLogger("tensorstow")
_BLIND = (
    'overlap="forward" overlaps nothing: the model is compiled as a whole, in the middle of which'
    " no weight can be waited for, so step() returns when all are new. Compile its blocks instead,"
    " before the optimizer is made: model.layers[i] = torch.compile(model.layers[i])."
)


def carry(turn: Turn, ferry: Ferry | None) -> bool:
    """Give the gradients that are on an accelerator to the ferry; return whether there are any.

    The pipeline has begun an open step; ``ferry.end`` ends it.
    """
    dues = [due for due in turn.dues if due.member.mirror is not None]
    if ferry is None or not dues:
        return False
    ferry.open(due.member.number for due in dues)
    made = ferry.link.mark()
    for due in dues:
        if due.gradient is not None:
            left = has_left(due.member.owner)
            ferry.offer(due.member.number, due.gradient, None if left else made)
    return True


def is_carried(turn: Turn) -> bool:
    """Return whether any gradient of the step is on an accelerator."""
    return any(due.member.mirror is not None for due in turn.dues)


def hand_over_lent(turn: Turn, leases: Leases) -> None:
    """Hand over the gradients whose weights are on disk, chunk by chunk."""
    for due in turn.dues:
        if due.member.lessor is not None and due.gradient is not None:
            leases.offer(due.member, due.gradient)
    leases.close()


class AtOnce:
    """``overlap="none"``."""

    phase = Phase.BETWEEN
    why_broken = None

    def __init__(self) -> None:
        """Begin with nothing under way."""
        self._leases: Leases | None = None

    def run(self, turn: Turn, kept: Members, states: States) -> None:
        """Return when every weight is new."""
        if kept.sides is not None:
            run_on_device(turn, kept, states, kept.sides)
            return
        pipeline, ferry = kept.store.pipeline, kept.ferry
        leases = self._leases = lend(kept, turn.rows, captures=turn.commits)
        is_open = leases is not None or is_carried(turn)
        pipeline.step(turn.rows, turn.scalars, StepKind(open=is_open, capture=turn.commits))
        if is_open:
            try:
                carried = carry(turn, ferry)
                if leases is not None:
                    hand_over_lent(turn, leases)
                if carried and ferry is not None:
                    ferry.end()
                    kept.finish()
                else:
                    pipeline.close_step()
                pipeline.wait_published()
                if leases is not None:
                    leases.end_all()
            except BaseException as error:
                pipeline.poison(error)
                raise
        self._leases = None
        account(turn, states)
        for due in turn.dues:
            deliver(due.member)

    def wait(self, kept: Members, ids: Iterable[int] | None = None) -> None:
        """Return: nothing is ever under way."""

    def finish(self, kept: Members) -> None:
        """Return, as ``wait`` does."""

    def give_up(self) -> None:
        """End what a failed step was lent: its store is gone."""
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.end_all()


class BesideForward:
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
        self._under_way: dict[int, Due] = {}
        self._versions: dict[int, int] = {}
        self._has_said = False
        self._lock = threading.RLock()  # any thread may read a weight
        self._given: dict[int, Given] = {}

    def run(self, turn: Turn, kept: Members, states: States) -> None:
        """Return at once; weights and gradients stay alive until they are used.

        Weights that nobody can wait for, for they are outside of the model, are new by then.
        """
        self._arrange(kept)
        pipeline = kept.store.pipeline
        if self._poison:
            shadow(turn)
            for due in turn.dues:
                hide(due.member)
        if any(member.lessor is not None for member in kept.all()):
            message = (
                'overlap="forward" was asked for with parameters on disk, whose memory is let go of'
                ' before the next forward. Use "backward" or "none".'
            )
            raise OptionError(message)
        carried = is_carried(turn)
        kind = StepKind(carried, turn.commits, background=not carried, home_first=True)
        pipeline.step(turn.rows, turn.scalars, kind)
        if carry(turn, kept.ferry) and kept.ferry is not None:
            kept.ferry.end()
            if turn.commits:
                kept.finish()  # the thread that commits cannot move the ferry on
        self._under_way = {id(due.member.owner): due for due in turn.dues}
        self._versions = {i: _version(due) for i, due in self._under_way.items()}
        self._given = {i: Given.of(due.member) for i, due in self._under_way.items()}
        account(turn, states)
        waiter = self._make_waiter(kept)
        for due in turn.dues:
            withhold(due.member.owner, waiter)
        self.wait(kept, [i for i in self._under_way if not self._waits.covers(i)])
        if self._waits.blind and not self._has_said:
            self._has_said = True
            logger.warning(_BLIND)

    def wait(self, kept: Members, ids: Iterable[int] | None = None) -> None:
        """Return once the parameters with these ids, or all, have their new weights."""
        kept.join()  # also where another stream has waited for the same weights
        wanted = None if ids is None else list(ids)
        under_way = self._under_way.keys()
        if not under_way or (wanted is not None and under_way.isdisjoint(wanted)):
            return
        # What we do with weights ourselves waits for nothing. Signals are the outer ones: a handler
        # that commits waits for all, and may have to wait for another thread's call.
        with SignalsDeferred(), self._lock, torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001
            self._wait(kept, wanted)

    def _wait(self, kept: Members, ids: Iterable[int] | None) -> None:
        wanted = list(self._under_way) if ids is None else [i for i in ids if i in self._under_way]
        if not wanted:
            return
        numbers = [self._under_way[i].member.number for i in wanted]
        try:
            kept.finish(None if ids is None else numbers)
            if ids is None:
                kept.store.pipeline.wait_published()
            else:
                kept.store.pipeline.wait_parameters(numbers)
        except StowError:  # an interrupt leaves it all under way: gradients are still read
            self.give_up()  # the pipeline is poisoned, and no gradient is being read
            raise
        for identity in wanted:
            due = self._under_way[identity]
            try:
                self._check_gradient(due, identity)
                self._given[identity].check(due.member)
            except StowError as error:
                self.give_up()
                kept.store.pipeline.poison(error)
                raise
            deliver(due.member)
            publish(due.member.owner)  # behind that: another thread may read it from here on
            del self._under_way[identity]  # last: an interrupt before has it done once more
        if not self._under_way:
            self._given.clear()

    def _check_gradient(self, due: Due, identity: int) -> None:
        if _version(due) != self._versions[identity]:
            raise _changed_while_used()

    def finish(self, kept: Members) -> None:
        """End the step that is under way: no more will come."""
        self.wait(kept)

    def give_up(self) -> None:
        """Forget the step that is under way: its store is gone, or has failed."""
        for due in self._under_way.values():
            publish(due.member.owner)
        self._under_way.clear()
        self._given.clear()

    def _make_waiter(self, kept: Members) -> Waiter:
        # Weakly: the model may hold its optimizer, and weights under way are known to everybody.
        method, members = weakref.WeakMethod(self.wait), weakref.ref(kept)

        def wait(ids: Iterable[int]) -> None:
            alive, held = method(), members()
            if alive is not None and held is not None:
                alive(held, ids)

        return wait

    def _arrange(self, kept: Members) -> None:
        order = (id(kept.store), self._waits.order())
        if order != self._last_order:
            members = [m for i in order[1] if (m := kept.by_id(i)) is not None]
            kept.store.pipeline.order(by_first(kept.store.chunks, [m.number for m in members]))
            self._last_order = order


@dataclass(frozen=True, slots=True)
class _Falling:
    """A gradient of a parameter in host memory, which is there or comes from the device."""

    member: Member
    gradient: torch.Tensor
    mark: Arrival | None
    """Behind which it is there; None: it is."""

    @property
    def is_down(self) -> bool:
        return self.mark is None or self.mark.query()


class BesideBackward:
    """``overlap="backward"``."""

    def __init__(self, landed: LandedGradients, *, poison: bool) -> None:
        """``landed`` knows which gradients are final; ``poison`` as in BesideForward."""
        self.landed = landed
        self._poison = poison
        self._turn: Turn | None = None
        self._leases: Leases | None = None
        self._pace: Pace | None = None
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
        if self._turn is None:
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
        turn = self._turn
        for due in [] if turn is None else turn.dues:
            if _written(due.member) != self._written[due.member.number]:
                return "a weight was written or replaced between backward and step()"
        return None

    def is_given_up(self) -> bool:
        """Return whether the backward that calls this hook is one whose step was given up."""
        return -1 < torch._C._current_graph_task_id() <= self._given_up  # noqa: SLF001

    def break_off(self) -> None:
        """Say that a gradient was not taken as it should: the step will never be whole."""
        self._has_ended, self._task = False, -1

    def _watch_backward(self, turn: Turn) -> None:
        """Learn whether the backward that is running, if any, ends."""
        self._task = torch._C._current_graph_task_id()  # noqa: SLF001
        self._has_ended = self._task == -1
        if self._has_ended:
            return
        schedule = weakref.ref(self)

        def ended() -> None:  # not called where anything has raised
            alive = schedule()
            if alive is not None and alive._turn is turn and alive._task != -1:  # noqa: SLF001
                alive._has_ended = True  # noqa: SLF001

        engine: Any = torch.autograd.Variable._execution_engine  # noqa: SLF001  # as FSDP2 does
        engine.queue_callback(ended)

    @property
    def is_open(self) -> bool:
        """Whether updates of a step have begun that ``step()`` has not ended."""
        return self._turn is not None

    def open(self, turn: Turn, kept: Members) -> None:
        """Begin a step of which no gradient is there yet."""
        if not self._last_order:
            # Nothing is known of this model yet: backward mostly goes from its end to its begin.
            last_first = range(len(kept) - 1, -1, -1)
            kept.store.pipeline.order(by_last(kept.store.chunks, last_first))
        if self._poison:
            shadow(turn)
        kind = StepKind(open=True, capture=turn.commits, background=not is_carried(turn))
        try:
            self._leases = lend(kept, turn.rows, captures=turn.commits)
            kept.store.pipeline.step(turn.rows, turn.scalars, kind)
            if kept.ferry is not None:
                kept.ferry.open(due.member.number for due in turn.dues)
            if kept.ferry is None:  # which holds few gradients on the host at once
                due = [due.member.number for due in turn.dues]
                self._pace = Pace(kept.store.pipeline, kept.store.chunks, due)
            members = [due.member for due in turn.dues]
            self._written = {m.number: _written(m) for m in members}
            self._watch_backward(turn)
            self._turn = turn
        except BaseException as error:  # an interrupt: open for the pipeline, and not for us
            kept.store.pipeline.poison(error)
            raise

    def land(self, member: Member, kept: Members) -> None:
        """Hand over the gradient of ``member``, which is final."""
        turn = self._turn
        if turn is None:
            message = "A gradient was handed over outside of a step."
            raise OptionError(message)
        pipeline = kept.store.pipeline
        _, fall = gradient_on_its_way(member.owner)

        def start(gradient: torch.Tensor) -> None:
            # Before the weight changes: a graph that still needs the old one must not go on.
            torch.autograd.graph.increment_version(member.parameter)
            hide(member)
            self._written[member.number] = _written(member)
            if member.mirror is None or kept.ferry is None:
                self._falling.append(_Falling(member, gradient, fall))
            else:
                kept.ferry.offer(member.number, gradient, kept.ferry.link.mark())
                kept.ferry.move_on()

        try:
            self.landed.hand_over(member.number, member.owner, start)
            self._land_fallen(pipeline)
            if self._pace is not None:
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
        number = falling.member.number
        if self._leases is not None:
            self._leases.land(falling.member, falling.gradient)
        else:
            pipeline.land(number, falling.gradient)
        if self._pace is not None:
            self._pace.landed(number)

    def _wait_for_one(self, pipeline: UpdatePipeline, numbers: Sequence[int]) -> bool:
        """Return when one gradient more is used, or there; False: none can be."""
        if self._pace is not None and self._pace.wait_for_one(numbers):
            return True
        if not self._falling:
            return False
        self._land_first(pipeline)
        return True

    @property
    def commits(self) -> bool:
        """Whether the open step commits."""
        return self._turn is not None and self._turn.commits

    def check_unchanged(self) -> None:
        """Raise OptionError where the step that is open cannot be ended as it was begun."""
        turn = self._turn
        if turn is None:
            return
        require(Call.STEP, self)
        now = scalars_of(turn.dues, turn.counts, 1.0)
        rows = [turn.rows[due.member.number].scalars for due in turn.dues]
        began = [tuple(turn.scalars[row].tolist()) for row in rows]
        if now != began:
            message = (
                "A hyper-parameter (lr, betas, eps, weight_decay, maximize) was changed between"
                ' backward and step(), and with overlap="backward" updates have begun by then.'
                f" Change it back, call step(), and change it behind that. Else {LEAVE}."
            )
            raise OptionError(message)

    def end(self, late: Iterable[Member], kept: Members, states: States) -> None:
        """End the step that is open; ``late`` have gradients that were not final before."""
        opened = self._turn
        if opened is None:
            message = "A step was ended that had not begun."
            raise OptionError(message)
        pipeline = kept.store.pipeline
        on_time = len(self.landed.arrived)
        for member in late:
            self.land(member, kept)
        arrived = set(self.landed.arrived)
        pairs = [
            (due, count)
            for due, count in zip(opened.dues, opened.counts, strict=True)
            if due.member.number in arrived
        ]
        order = self.landed.arrived
        self._turn = None
        try:
            self._land_fallen(pipeline, wait=True)
            if self._leases is not None:
                self._leases.close()
            if kept.ferry is None:
                pipeline.close_step()
            else:
                kept.ferry.end()
                kept.finish()
            pipeline.wait_published()
            if self._leases is not None:
                self._leases.end_all()
                self._leases = None
        except BaseException:
            self.landed.take_back()  # or the next backward would add to them, and that be the error
            pipeline.lent.append(self.landed.held)  # they may be read still
            raise
        finally:
            self.landed.restart()
        if order != self._last_order and on_time == len(order):
            pipeline.order(by_last(kept.store.chunks, order))
            self._last_order = order
        ended = Turn([d for d, _ in pairs], [c for _, c in pairs], [], opened.scalars)
        for due in opened.dues:
            if due.member.number in arrived:
                deliver(due.member)
            due.member.host = None
        account(ended, states)

    def wait(self, kept: Members, ids: Iterable[int] | None = None) -> None:
        """Return: ``step()`` has waited. Raises OptionError before that, outside of backward.

        Inside, a checkpoint's forward runs again; what it reads is not updated yet, or autograd
        finds out.
        """
        del ids
        if self.is_open and torch._C._current_graph_task_id() == -1:  # noqa: SLF001
            kept.store.pipeline.check_alive()
            require(Call.FORWARD, self)

    def finish(self, kept: Members) -> None:
        """Return: a step without its ``step()`` is given up."""

    def give_up(self) -> None:
        """Forget the step that is open, and its gradients: its store is gone.

        Ends what the step was lent, and what one that failed was. Hooks of a backward that has
        begun, which may still come, find it given up ([Note: Hooks] in calls).
        """
        self._given_up = newest_backward()
        self._turn = None
        self._falling.clear()
        leases, self._leases = self._leases, None
        if leases is not None:
            leases.end_all()
        self._last_order = []
        self.landed.take_back()
        self.landed.restart()


def _written(member: Member) -> tuple[int, int]:
    """Return what changes where the weight is written, or exchanged by ``p.data = ...``."""
    return member.parameter._version, member.parameter.data_ptr()  # noqa: SLF001


def _version(due: Due) -> int:
    return 0 if due.gradient is None else due.gradient._version  # noqa: SLF001


def _changed_while_used() -> OptionError:
    message = (
        "A gradient was changed in place between step() and the forward that waits for its update"
        " (by model.zero_grad(set_to_none=False), say), and the update was still reading it. Use"
        " optimizer.zero_grad(), set_to_none=True, or call optimizer.wait() before."
    )
    return OptionError(message)
