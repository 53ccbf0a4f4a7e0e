"""Chunks updated on the device, all or some, and others on the host: the same bits."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models import Vectors
from parity.beside import engine_of
from parity.cover import crossed
from remote import make_remote
from stepped import CHUNK, DTYPES, SIZES, TIGHT, make, make_away, same, same_states, train
from stopped import stop
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import DamageError, OptionError, PoisonedError
from tensorstow.base.update_on import UpdateOn
from tensorstow.states.chunks import Chunk
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.step import share_tuner, update_router
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.device_updater import DeviceUpdater
from tensorstow.step.share_tuner import ShareTuner, SideTiming

BY_DEVICE: tuple[UpdateOn, ...] = ("device", 0.25, 0.7, "hybrid", "auto")


@crossed(where=BY_DEVICE, dtype=tuple(DTYPES), states=("ram", "disk"))
def test_the_bits_are_the_host_s(
    where: UpdateOn, dtype: str, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    want, net = Vectors(SIZES, DTYPES[dtype]), Vectors(SIZES, DTYPES[dtype])
    reference = make(want)
    train(want, reference, 6)
    make_remote(monkeypatch)
    given = {} if states == "ram" else {"ram_budget": TIGHT}
    optimizer = make(net, update_on=where, states=states, **given)
    train(net, optimizer, 6)
    assert same(net, want)
    assert same_states(optimizer, reference)
    optimizer.close()


@crossed(
    place=(("device", 0.5), (0.5, "disk"), (0.5, "ram")),
    schedule=("pipelined", "naive"),
    state_format=("fp32", "split", "bf16", "int8"),
)
def test_every_format(
    state_format: str,
    schedule: Any,  # noqa: ANN401
    place: tuple[UpdateOn, str | float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inexact ones too: what they draw hangs on the step and the element alone."""
    policy = PipelinePolicy(chunk_elements=CHUNK, schedule=schedule)
    want, net = Vectors(SIZES, torch.bfloat16), Vectors(SIZES, torch.bfloat16)
    reference = make(want, state_format=state_format)
    train(want, reference, 4)
    make_remote(monkeypatch)
    where, states = place
    given = {"state_format": state_format, "policy": policy, "states": states}
    optimizer = make(net, update_on=where, **given)
    train(net, optimizer, 4)
    assert same(net, want)
    assert same_states(optimizer, reference)


@pytest.mark.parametrize("where", ["device", 0.5, "auto"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_others_write_and_who_joins(
    dtype: str, where: UpdateOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weight of both sides, whose host weight is stale in parts, is written by others."""

    def meddle(net: Vectors, other: Vectors, optimizer: AdamW) -> None:
        for step in range(8):
            net.parts[4].requires_grad_(step not in {1, 2})
            optimizer.zero_grad()
            torch.autograd.backward(net() + other())
            if step == 3:
                net.parts[0].grad = None
                optimizer.add_param_group({"params": list(other.parameters()), "lr": 0.02})
            optimizer.step()
            if step in {0, 5}:
                with torch.no_grad():
                    net.parts[0].mul_(1.5)
                    net.parts[4].mul_(0.5)
                    net.parts[2].mul_(1.0)  # written, and the same
                net.parts[5].data = net.parts[5].data.flip(0).clone()

    kind = DTYPES[dtype]
    want, net = (
        (Vectors(SIZES, kind), Vectors(SIZES, kind, seed=1)),
        (Vectors(SIZES, kind), Vectors(SIZES, kind, seed=1)),
    )
    meddle(*want, make(want[0]))
    make_remote(monkeypatch)
    meddle(*net, make(net[0], update_on=where))
    assert same(net[0], want[0])
    assert same(net[1], want[1])


def joined(
    where: UpdateOn | None, monkeypatch: pytest.MonkeyPatch, join: Callable[[AdamW, Vectors], None]
) -> tuple[Vectors, Vectors]:
    """Train one net for three steps, then another with it."""
    nets = Vectors(SIZES), Vectors(SIZES, seed=1)
    if where is not None:
        make_remote(monkeypatch)
    optimizer = make(nets[0], **({} if where is None else {"update_on": where}))
    train(nets[0], optimizer, 3)
    join(optimizer, nets[1])
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(nets[0]() + nets[1]())
        optimizer.step()
    return nets


def add(optimizer: AdamW, net: Vectors) -> None:
    optimizer.add_param_group({"params": list(net.parameters())})


def test_weights_are_fetched_where_the_share_has_moved_as_others_join(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Chunks that change sides are updated from the newer of their two weights."""

    def add_as_it_moves(optimizer: AdamW, net: Vectors) -> None:
        optimizer._params().update_router.share_tuner.share = 0.1
        add(optimizer, net)

    want = joined(None, monkeypatch, add)
    got = joined("hybrid", monkeypatch, add_as_it_moves)
    assert all(map(same, got, want))


MADE = ("make_host_weights", "DeviceUpdater", "StepFeeds")


@pytest.mark.parametrize(
    ("where", "what"),
    [("hybrid", "DeviceFeed"), *((where, what) for where in ("device", "hybrid") for what in MADE)],
)
def test_what_did_not_fit_as_it_joined_is_updated_once_it_does(
    what: str, where: UpdateOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_twice(optimizer: AdamW, net: Vectors) -> None:
        def refuse(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError

        with monkeypatch.context() as patch:
            patch.setattr(update_router, what, refuse)
            with pytest.raises(torch.OutOfMemoryError):
                add(optimizer, net)
        add(optimizer, net)

    want = joined(None, monkeypatch, add)
    got = joined(where, monkeypatch, add_twice)
    assert all(map(same, got, want))


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_auto_gives_back_what_the_other_side_had(
    dtype: str,
    there: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And goes on with new parameters on the side that it has chosen."""
    note = ShareTuner.note

    def faster(self: ShareTuner, host: SideTiming, device: SideTiming, *, commits: bool) -> None:
        seconds = (2.0, 1.0) if there else (1.0, 2.0)
        host, device = (
            SideTiming(host.elements, seconds[0]),
            SideTiming(device.elements, seconds[1]),
        )
        note(self, host, device, commits=commits)

    def both(net: Vectors, other: Vectors, optimizer: AdamW) -> list[tuple[bool, bool]]:
        held = []
        for step in range(8):
            optimizer.zero_grad()
            torch.autograd.backward(net() + other())
            if step == 6:
                optimizer.add_param_group({"params": list(other.parameters())})
            optimizer.step()
            memory = optimizer._memory()
            held.append((memory.staging_bytes > 0, memory.device_bytes > 0))
        return held

    kind = DTYPES[dtype]
    want, net = Vectors(SIZES, kind), Vectors(SIZES, kind)
    others = Vectors(SIZES, kind, seed=1), Vectors(SIZES, kind, seed=1)
    reference = make(want)
    both(want, others[0], reference)
    make_remote(monkeypatch)
    monkeypatch.setattr(ShareTuner, "note", faster)
    optimizer = make(net, update_on="auto")
    held = both(net, others[1], optimizer)
    assert held == [(True, True)] * 4 + [(not there, there)] * 4
    feeds = optimizer._params().update_router.device_feeds
    stagings = {id(feed.staging) for feed in feeds}
    memory = optimizer._states().pipeline.memory
    assert there == (not stagings)
    assert stagings <= {id(block) for block in memory}
    assert same(net, want)
    assert same(others[1], others[0])
    assert same_states(optimizer, reference)
    optimizer.close()


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_bytes_over_the_link_and_in_memory(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, DTYPES[dtype], update_on=0.5)
    params = optimizer._params()
    (feed,) = params.update_router.device_feeds
    here = set(feed._chunks)
    chunks = optimizer._states().chunks

    def weights(side: list[Chunk]) -> int:
        return sum(DTYPES[dtype].itemsize * r.count for c in side for r in c.plan.runs)

    host, there = ([c for c in chunks if (c.number in here) == side] for side in (True, False))
    assert host
    assert there
    train(net, optimizer)
    before = optimizer._traffic()
    train(net, optimizer, 3)
    after = optimizer._traffic()
    states = sum(c.family.state_bytes(c.plan.elements) for c in there)
    # Of fp32 weights, what the device updates stays there, and what the host updates is here.
    masters = weights(there) if dtype == "bf16" else 0
    assert after.bytes_up - before.bytes_up == 3 * (states + weights(host))
    assert after.bytes_down - before.bytes_down == 3 * (states + masters + weights(host))
    assert after.device_share == pytest.approx(0.5, abs=1 / len(chunks) + 0.05)
    held = optimizer._memory()
    assert held.device_bytes > 0
    assert held.staging_bytes > 0


@pytest.mark.parametrize("now", [None, "host", "device", "auto"])
@pytest.mark.parametrize("before", ["host", "device", "hybrid", "auto", 0.6])
def test_a_run_goes_on_wherever_it_was_updated(
    before: UpdateOn, now: UpdateOn | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = Vectors(SIZES, torch.bfloat16)
    train(want, make(want), 7)
    make_remote(monkeypatch)
    first = Vectors(SIZES, torch.bfloat16)
    optimizer = make(first, dir=tmp_path, commit_every=2, update_on=before)
    train(first, optimizer, 3)
    stop(optimizer)  # the third step is lost
    net = Vectors(SIZES, torch.bfloat16, seed=7)
    optimizer = make(net, dir=tmp_path, commit_every=3, update_on=now)
    assert optimizer.resume() == 2
    wanted = before if now is None else now
    assert (optimizer.offload_policy.update_on or "host") == wanted
    router = optimizer._params().update_router
    assert (bool(router.updaters), bool(router.device_feeds)) == (
        wanted != "host",
        wanted != "device",
    )
    train(net, optimizer, 5)
    assert same(net, want)
    optimizer.close()
    again = Vectors(SIZES, torch.bfloat16, seed=8)
    last = make(again, dir=tmp_path)
    last.resume()
    assert (last.offload_policy.update_on or "host") == wanted
    assert same(again, want)
    last.close()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_the_side_that_auto_has_not_chosen_is_freed_at_once(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by a later collection: its slots are memory of the device."""
    monkeypatch.setattr(
        share_tuner._Auto, "_decide", lambda self, *_: setattr(self, "share", share)
    )
    net = Vectors(SIZES, torch.bfloat16)
    make_remote(monkeypatch)
    optimizer = make(net, update_on="auto")
    train(net, optimizer, 1)
    router = optimizer._params().update_router
    dropped = weakref.ref(router.device_feeds[0] if share else router.updaters[0])
    gc.disable()
    try:
        train(net, optimizer, 5)
        assert dropped() is None
    finally:
        gc.enable()
    optimizer.close()


def test_a_share_that_nobody_knows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(monkeypatch, dir=tmp_path, update_on=0.5)
    train(net, optimizer)
    object.__setattr__(optimizer._params().offload_policy, "update_on", "moon")
    optimizer.close()
    again = make(Vectors(SIZES), dir=tmp_path)
    with pytest.raises(DamageError, match="place of updates cannot be 'moon'"):
        again.resume()
    again.close()


@pytest.mark.parametrize("where", ["device", 0.5, "hybrid", "auto"])
def test_beside_the_next_forward_is_refused_by_name(
    where: UpdateOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_remote(monkeypatch)
    with pytest.raises(OptionError, match=f'update_on=.?{where}.? .* overlap="forward"'):
        make(Vectors(SIZES), update_on=where, overlap="forward")


@crossed(copies=(0, 1, 5), way=("h2d", "d2h"), where=("device", 0.5))
def test_what_fails_on_the_link_ends_the_run(
    copies: int, way: str, where: UpdateOn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = Vectors(SIZES, torch.bfloat16)
    train(want, make(want), 4)
    opened = make_remote(monkeypatch)
    net = Vectors(SIZES, torch.bfloat16)
    optimizer = make(net, dir=tmp_path, commit_every=2, update_on=where)
    train(net, optimizer, 3)
    link, left = opened[-1], [copies]
    copy = getattr(link, way)

    def breaks(*given: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            message = "CUDA error: an illegal memory access was encountered"
            raise RuntimeError(message)
        return copy(*given)

    with monkeypatch.context() as patch:
        patch.setattr(link, way, breaks)
        with pytest.raises(RuntimeError, match="illegal memory access"):
            train(net, optimizer)
    with pytest.raises(PoisonedError):
        train(net, optimizer)
    assert optimizer.resume() == 2
    train(net, optimizer, 2)
    assert same(net, want)
    optimizer.close()


@crossed(where=("device", 0.5), spared=range(4), operation=("read", "write"))
def test_a_disk_that_fails_is_told_as_ever(
    where: UpdateOn, spared: int, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(monkeypatch, ram_budget=TIGHT, update_on=where)
    train(net, optimizer)
    optimizer.synchronize()
    engine = engine_of(optimizer)
    engine.inject_fault(operation, after=spared, times=-1, error=5)
    with pytest.raises(OSError, match=f"{operation} of"):
        train(net, optimizer, 3)
    engine.clear_faults()
    with pytest.raises(PoisonedError):
        train(net, optimizer)
    optimizer.close()


def test_each_side_works_while_the_other_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of the host stay under way until one of the device's is: nobody waits for them."""
    order: list[str] = []

    def watch(kind: type, name: str) -> None:
        do = getattr(kind, name)

        def told(self: object, *given: object, **more: object) -> None:
            order.append(name)
            do(self, *given, **more)

        monkeypatch.setattr(kind, name, told)

    watch(DeviceFeed, "_start_d2h")
    watch(DeviceFeed, "_start_h2d")
    watch(DeviceUpdater, "_start")
    watch(DeviceUpdater, "_release")
    is_updated = UpdatePipeline.is_updated

    def is_seen(self: UpdatePipeline, chunk: int) -> bool:
        return "_start" in order and is_updated(self, chunk)

    net, optimizer = make_away(monkeypatch, update_on=0.5)
    train(net, optimizer)
    order.clear()
    monkeypatch.setattr(UpdatePipeline, "is_updated", is_seen)
    train(net, optimizer)
    here = there = at_once = 0
    for event in order:
        here += (event == "_start_d2h") - (event == "_start_h2d")
        there += (event == "_start") - (event == "_release")
        at_once = max(at_once, min(here, there))
    assert (here, there) == (0, 0)
    assert at_once > 0
