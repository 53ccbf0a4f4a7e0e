"""Schedules do at once what they say they do: while a unit is held up, what goes beside it ends.

Each unit holds up the device in the middle of its own products, in forward and in backward, and
the host with it. What a plan does beside these products must then be over by itself; only behind
that the unit goes on. A schedule that serialises waits for what is held up, and fails when ``LONG``
is over. Nothing is measured, so it does not matter what else this machine does.

A unit has one weight, which is one chunk: copies are counted in units.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import pytest
import torch
from torch import nn

from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import UpdateOn
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of
from tensorstow.io.device_link import DeviceEvent, Pairs, StreamLink
from tensorstow.memory.buffer_pool import BufferPool, PooledBuffer
from tensorstow.memory.moving_bytes import ByteState
from tensorstow.states import memory
from tensorstow.states.native_pipeline import CallerChunks, UpdatePipeline

LONG = 15.0
"""Seconds; a busy machine needs less for a few small copies."""
Backward = Callable[[torch.Tensor], None]
Step = Callable[[AdamW], None]
UNITS = 6
SLOTS = 3
"""Of the device's memory: for chunks that go up, are updated, and come down."""
WIDTH = 128
CHUNK = WIDTH * WIDTH


class Hold(Protocol):
    """What a stream is held up by."""

    def release(self) -> bool:
        """Let go; return whether the stream was held until now."""


class Watch:
    """What the host has begun and waited for: copies of all links, in their order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.down: list[DeviceEvent] = []
        self.up: list[DeviceEvent] = []
        self.order: list[str] = []
        self.waited: set[int] = set()
        """Parameters for whose update somebody has waited, as it was not over."""
        self.hold_down: Callable[[], Hold] | None = None
        """What holds up streams before the next copy down, each once."""
        self.held: dict[int, Hold] = {}
        """What they are held up by."""
        self.late = 0
        """How often no chunk is there to be acquired yet; below 0: how often one is waited for."""
        self.taken: set[int] = set()
        """Chunks that were acquired."""
        self._acquired: list[tuple[int, int]] = []
        for name, events in (("d2h", self.down), ("h2d", self.up)):
            self._watch_copies(patch, name, events)
        published, parameters = UpdatePipeline.wait_published, UpdatePipeline.wait_parameters

        def wait_published(pipeline: UpdatePipeline) -> None:
            self.waited.update(range(UNITS))
            published(pipeline)

        def wait_parameters(pipeline: UpdatePipeline, numbers: Sequence[int]) -> None:
            self.waited.update(n for n in numbers if not pipeline.is_published(n))
            parameters(pipeline, numbers)

        patch.setattr(UpdatePipeline, "wait_published", wait_published)
        patch.setattr(UpdatePipeline, "wait_parameters", wait_parameters)
        self._acquire = CallerChunks.acquire

        def acquire(caller_chunks: CallerChunks, *, wait: bool) -> tuple[int, int] | None:
            if self.late > 0 and not wait:
                self.late -= 1
                caller_chunks.signal()
                return None
            if self.late < 0:
                self.late, wait = self.late + 1, True
            acquired = (
                self._acquired.pop() if self._acquired else self._acquire(caller_chunks, wait=wait)
            )
            self.taken.update([] if acquired is None else acquired[:1])
            return acquired

        patch.setattr(CallerChunks, "acquire", acquire)

    def clear(self) -> None:
        """Begin to count anew."""
        self.down.clear()
        self.up.clear()
        self.order.clear()
        self.waited.clear()
        self.taken.clear()

    def can_acquire(self, chunk: int, caller_chunks: CallerChunks) -> bool:
        """Return whether a chunk was acquired, or can be now."""
        if chunk not in self.taken and not self._acquired:
            found = self._acquire(caller_chunks, wait=False)
            self._acquired += [] if found is None else [found]
        return chunk in self.taken or bool(self._acquired)

    def _watch_copies(
        self, patch: pytest.MonkeyPatch, name: str, events: list[DeviceEvent]
    ) -> None:
        begin = getattr(StreamLink, name)

        def copy(link: StreamLink, pairs: Pairs, after: Iterable[DeviceEvent] = ()) -> DeviceEvent:
            stream = link._d2h_stream
            if name == "d2h" and self.hold_down is not None and stream.stream_id not in self.held:
                with stream:
                    self.held[stream.stream_id] = self.hold_down()
            over: DeviceEvent = begin(link, pairs, after)
            if pairs:
                events.append(over)
                self.order.append(name)
            return over

        patch.setattr(StreamLink, name, copy)


@pytest.fixture
def simulated(device: torch.device) -> ModuleType:
    """Return the package of the simulated accelerator."""
    if device.type != "simulated":
        pytest.skip("the simulated accelerator alone can be held up")
    import simulated  # noqa: PLC0415  # registers the device

    return simulated


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def over(events: Collection[DeviceEvent]) -> int:
    """Return how many events are over."""
    return sum(event.query() for event in list(events))


def wait_until(is_so: Callable[[], bool]) -> bool:
    """Return whether it is so before too long."""
    end = time.monotonic() + LONG
    while not is_so():
        if time.monotonic() > end:
            return False
        time.sleep(1e-3)
    return True


def _backward(loss: torch.Tensor) -> None:
    loss.backward()


def _step(optimizer: AdamW) -> None:
    optimizer.step()  # not the class's, which torch exchanges for one with hooks


# --- units that hold up what computes them ---


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's
        x: torch.Tensor,
        number: int,
        pause: Callable[[str, int], None],
    ) -> torch.Tensor:
        ctx.number, ctx.pause = number, pause
        pause("forward", number)
        return x.clone()

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        gradient: torch.Tensor,
    ) -> tuple[torch.Tensor, None, None]:
        ctx.pause("backward", ctx.number)
        return gradient.clone(), None, None


class Unit(nn.Module):
    def __init__(self, number: int, pause: Callable[[str, int], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.number, self.pause = number, pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Pause.apply(self.linear(x), self.number, self.pause)
        return out


class WatchedRun:
    """A training by a plan; ``missing`` is what was not over where it should have been."""

    def __init__(self, plan: Plan, simulated: ModuleType, watch: Watch, directory: Path) -> None:
        self.plan, self.watch = plan, watch
        self.missing: list[str] = []
        self.begin: dict[tuple[str, int], Callable[[], None]] = {}
        """What is called, once, when the host comes to a unit."""
        self._simulated = simulated
        self._holds: list[Hold] = []
        """Of the stream that computes: of the unit before, and of the one that the host is in."""
        self._is_watched = False
        self._goes_up = plan.parameters != Tier.DEVICE and plan.accumulation_steps == 1
        """Whether weights go up that are counted from the end of a step to that of the next."""
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(Unit(i, self._pause) for i in range(UNITS))).bfloat16()
        if plan.parameters == Tier.DEVICE:
            model.to(simulated.DEVICE)
        given = {"dir": directory} if plan.parameters == Tier.DISK else {}
        make = partial(AdamW, lr=1e-3, policy=PipelinePolicy(chunk_elements=CHUNK))
        self.model, self.optimizer = stow(model, make, plan=plan, **given)
        self.x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=simulated.DEVICE)

    def train(self, backward: Backward = _backward, step: Step = _step) -> None:
        """Take four steps; ``backward`` and ``step`` take their parts of the last but one."""
        for number in range(4):
            is_last_but_one = number == 2
            self._is_watched = number > 1
            for _ in range(self.plan.accumulation_steps):
                if not self._goes_up:
                    self.watch.clear()
                loss = self.model(self.x).float().sum()
                (backward if is_last_but_one else _backward)(loss)
            self._let_go("backward returns")
            self._is_watched = False
            self.watch.clear()
            (step if is_last_but_one else _step)(self.optimizer)
            self.optimizer.zero_grad()
            for pager in self._pagers()[:1] if self.plan.parameters == Tier.DISK else ():
                pager.pool.synchronize()  # what is being written has no room for what is read
        self.optimizer.wait()
        self.optimizer.close()
        assert not self.missing

    def stop_watching(self) -> None:
        """Let units go by until the next step."""
        self._is_watched = False
        while self._holds:
            self._let_go("the host is here while the device is a unit behind")

    # --- inside ---

    def _let_go(self, what: str) -> None:
        """Let the device go on, which must have been held until now: ``what`` waited for it."""
        if self._holds and not self._holds.pop(0).release():
            self._miss(what)

    def _miss(self, what: str) -> None:
        self.missing.append(what)
        self._is_watched = False

    def _pause(self, way: str, number: int) -> None:
        """Hold the device up here, until what goes beside this unit is over."""
        if not self._is_watched or self.missing:
            return
        self.begin.pop((way, number), lambda: None)()
        name = f"{way} of unit {number}: "
        self._holds.append(self._simulated.hold(LONG))
        if self._goes_up:  # while the device is in the unit before
            wanted = self._weights(way, number)
            self._expect(f"{name}{wanted} weights up", lambda: over(self.watch.up) >= wanted)
        if len(self._holds) == 2:
            self._let_go(f"{name}the host is here while the device is a unit behind")
        if way == "backward":
            self._expect_of_backward(name, number)
        elif self.plan.overlap == "forward" and not self.watch.waited <= set(range(number + 1)):
            self._miss(f"{name}no wait for the updates of {self.watch.waited}")
        if self.plan.parameters == Tier.DISK and (way == "backward" or number > 0):
            self._expect(f"{name}the next are read", lambda: self._has_read(way, number))

    def _expect(self, what: str, is_so: Callable[[], bool]) -> None:
        if not self.missing and not wait_until(is_so):
            self._miss(what)

    def _weights(self, way: str, number: int) -> int:
        """Return how many weights are up when the host is in a unit."""
        ahead = self.plan.prefetch
        if self.plan.parameters == Tier.DISK:
            ahead = 1  # which has been read: see ``_has_read``
        if way == "forward":
            if self.plan.overlap == "forward" or (self.plan.parameters == Tier.DISK and number < 2):
                ahead = 0  # weights are asked for when they are new; reading ahead begins here
            return min(number + 1 + ahead, UNITS)
        return UNITS + UNITS - 1 - max(number - ahead, 0)  # the last unit's has stayed

    def _has_read(self, way: str, number: int) -> bool:
        """Return whether the units that come next are in memory, and nothing is being written."""
        following = [*range(number + 1, UNITS), UNITS - 2, UNITS - 3]
        if way == "backward":
            following = [*reversed(range(number))]
        pagers = self._pagers()
        writes = [pager for pager in pagers if pager.state is ByteState.WRITING]
        is_read = all(pagers[n].is_ready() for n in following[: self.plan.prefetch])
        return is_read and all(pager.is_over() for pager in writes)

    def _pagers(self) -> list[PooledBuffer]:
        prefetcher = h2d_prefetcher_of(self.model)
        assert prefetcher is not None
        units = dict.fromkeys(prefetcher._units.values())
        return [pager for unit in units for pager in unit.pagers]

    def _expect_of_backward(self, name: str, number: int) -> None:
        """What became of units behind this one: the next, the one behind it, and so on.

        Hooks of the units between take each a stage further, and the last of them was this one's
        neighbour's.
        """
        first, second, third = (set(range(number + n, UNITS)) for n in (1, 2, 3))
        plan, watch, params = self.plan, self.watch, self.optimizer._params()
        there = {
            chunk.number for u in params.update_router.updaters for chunk in u._chunks.values()
        }
        down = len(first - there)
        if plan.overlap == "backward":
            down += len(second & there)
            up = len(third - there) + len(second & there)
            if plan.parameters == Tier.DEVICE:
                self._expect(f"{name}{up} weights or states up", lambda: over(watch.up) >= up)
            pipeline = params.store.pipeline
            self._expect(
                f"{name}{second - there} updated by the host",
                lambda: all(map(pipeline.is_updated, second - there)),
            )
            if number + 1 in there:
                self._expect(
                    f"{name}the next unit's states are there",
                    lambda: watch.can_acquire(number + 1, pipeline.caller_chunks),
                )
        elif there:
            down = 0  # gradients stay
        self._expect(f"{name}{down} gradients or states down", lambda: over(watch.down) >= down)


PLANS = {
    "device": Plan(parameters="device"),
    "device, backward": Plan(parameters="device", overlap="backward"),
    "device, updated there, backward": Plan(
        parameters="device", update_on="device", overlap="backward"
    ),
    "device, updated on both, backward": Plan(
        parameters="device", update_on=0.5, overlap="backward"
    ),
    "host": Plan(parameters="host"),
    "host, micro-batches": Plan(parameters="host", accumulation_steps=2),
    "host, forward": Plan(parameters="host", overlap="forward"),
    "host, backward": Plan(parameters="host", overlap="backward"),
    "disk": Plan(parameters="disk"),
    "disk, backward": Plan(parameters="disk", overlap="backward"),
}


@pytest.fixture(autouse=True)
def _copies_take_no_time(simulated: ModuleType) -> Iterator[None]:
    simulated.set_delays(0, 1e12, 0)
    yield
    simulated.set_delays(1e-3, 5e9, 0)


@pytest.fixture(autouse=True)
def _writes_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy disk weights that are being written leave no room to read ahead for a while."""
    unpin = BufferPool.unpin

    def unpin_and_wait(pool: BufferPool, buffer: PooledBuffer, *, dirty: bool) -> None:
        unpin(pool, buffer, dirty=dirty)
        buffer.wait()

    monkeypatch.setattr(BufferPool, "unpin", unpin_and_wait)


@pytest.mark.parametrize("plan", PLANS)
def test_what_goes_beside_a_unit_is_over_while_the_unit_is_held_up(
    plan: str, simulated: ModuleType, watch: Watch, tmp_path: Path
) -> None:
    WatchedRun(PLANS[plan], simulated, watch, tmp_path).train()


# --- the other way round: copies are held up, and something else is not ---


@contextmanager
def held_until(*holds: tuple[Hold, Callable[[], bool]]) -> Iterator[None]:
    """Let go of each as soon as it is so, one after the other, and before too long."""
    found = []

    def wait() -> None:
        found.extend(wait_until(is_so) and hold.release() for hold, is_so in holds)

    waiting = threading.Thread(target=wait)
    waiting.start()
    yield
    waiting.join()
    assert found == [True] * len(holds)


@pytest.mark.parametrize("plan", [name for name in PLANS if "there" not in name])
def test_backward_computes_while_gradients_are_held_up(
    plan: str, simulated: ModuleType, watch: Watch, tmp_path: Path
) -> None:
    run = WatchedRun(PLANS[plan], simulated, watch, tmp_path)

    def backward(loss: torch.Tensor) -> None:
        run.stop_watching()
        watch.held.clear()
        watch.hold_down = partial(simulated.hold, LONG)
        loss.backward()
        computed = torch.accelerator.current_stream().record_event()
        watch.hold_down = None
        assert wait_until(computed.query)
        assert watch.held
        assert [hold.release() for hold in watch.held.values()] == [True] * len(watch.held)

    run.train(backward)


def test_a_step_is_over_while_its_weights_go_up(
    simulated: ModuleType, watch: Watch, tmp_path: Path
) -> None:
    def step(optimizer: AdamW) -> None:
        (feed,) = optimizer._params().update_router.device_feeds
        assert isinstance(feed.link, StreamLink)
        with feed.link._h2d_stream:
            hold = simulated.hold(LONG)
        optimizer.step()
        assert hold.release()
        assert len(watch.up) == UNITS

    WatchedRun(PLANS["device"], simulated, watch, tmp_path).train(step=step)


def test_gradients_come_down_before_others_are_used(watch: Watch, device: torch.device) -> None:
    """Of an optimizer by itself, whose gradients are on the device until its step."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS))).to(device)
    optimizer = AdamW(model.parameters(), policy=PipelinePolicy(chunk_elements=CHUNK))
    for _ in range(2):
        model(torch.ones(4, WIDTH, device=device)).sum().backward()
        watch.clear()
        optimizer.step()
    assert watch.order[:UNITS] == ["d2h"] * UNITS  # into as many slots
    optimizer.close()


def test_a_forward_begins_while_gradients_of_later_units_are_held_up(
    simulated: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the step before is over while the device has not come to the gradients."""
    monkeypatch.setattr(memory, "DEFAULT_STAGING_BYTES", 0)  # two slots
    model = nn.Sequential(*(Unit(i, lambda *_: None) for i in range(UNITS))).to(device)
    policy = PipelinePolicy(chunk_elements=CHUNK)
    optimizer = AdamW(model.parameters(), overlap="forward", module=model, policy=policy)
    x = torch.ones(4, WIDTH, device=device)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model(x).sum().backward()
    hold = simulated.hold(LONG)
    optimizer.step()
    (feed,) = optimizer._params().update_router.device_feeds
    assert isinstance(feed.link, StreamLink)
    with feed.link._d2h_stream:  # behind gradients of the first two units
        later = simulated.hold(LONG)
    assert hold.release()
    model[:2](x)
    assert wait_until(torch.accelerator.current_stream().record_event().query)
    assert later.release()
    optimizer.close()


@pytest.mark.parametrize("update_on", ["device", 0.5])
def test_states_go_up_while_others_come_down(
    update_on: UpdateOn,
    simulated: ModuleType,
    watch: Watch,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the host updates its chunks meanwhile, whose gradients come down late; nobody polls."""
    plan = Plan(parameters="device", update_on=update_on)
    looks: list[int] = []
    changes = CallerChunks.changes
    monkeypatch.setattr(CallerChunks, "changes", lambda own: looks.append(1) or changes(own))

    def step(optimizer: AdamW) -> None:
        router = optimizer._params().update_router
        holds = []
        for link in (*(f.link for f in router.device_feeds), router.updaters[0].link):
            assert isinstance(link, StreamLink)
            with link._d2h_stream:
                holds.append(simulated.hold(LONG))
        # States into all slots; then the host's weights too. Half of the units are the device's.
        states, all_of_them = (
            (lambda: over(watch.up) >= SLOTS),
            (lambda: over(watch.up) == UNITS),
        )
        watch.late = -SLOTS if update_on == "device" else SLOTS  # with both sides none is there yet
        looks.clear()
        with held_until(*zip(holds, (states, all_of_them), strict=False)):
            optimizer.step()
        assert len(looks) < 10 * UNITS  # each end of a copy or of an update is one reason to

    WatchedRun(plan, simulated, watch, tmp_path).train(step=step)
