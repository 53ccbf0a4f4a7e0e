"""What streams through the device, through how much memory, and that every copy is waited for.

Bits over all options are those of tests/gpu.
"""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from models import Vectors
from remote import LateLink, Later, make_remote
from stepped import DTYPES, SIZES, TIGHT, make, make_away, same, same_states, train
from stopped import stop
from tensorstow import AdamW
from tensorstow.base.errors import DamageError, OptionError
from tensorstow.base.update_on import UpdateOn
from tensorstow.io.pinned import PinnedBlock
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import parts_of
from tensorstow.states.memory import MOST_DEVICE_SLOTS
from tensorstow.step.device_updater import DeviceUpdater


def make_there(net: Vectors, **given: Any) -> AdamW:  # noqa: ANN401
    return make(net, **{"update_on": "device", **given})


def updater_of(optimizer: StowedAdam) -> DeviceUpdater:
    updater = next(iter(optimizer._params().update_router.updaters), None)
    assert updater is not None
    return updater


def link_of(optimizer: StowedAdam) -> LateLink:
    link = updater_of(optimizer).link
    assert isinstance(link, LateLink)
    return link


def test_a_stale_graph_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, update_on="device")
    train(net, optimizer)
    loss = net()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(loss)


# --- bytes ---


@pytest.mark.parametrize("states", ["ram", "disk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_and_bytes_are_the_formula(
    dtype: str, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(monkeypatch, DTYPES[dtype], update_on="device", states=states)
    chunks = optimizer._states().chunks
    held = optimizer._memory()
    slot = max(parts_of(c.family, c.plan.elements)[-1].file_at for c in chunks)
    assert (held.device_bytes, held.staging_bytes) == (MOST_DEVICE_SLOTS * slot, 0)
    # Nobody looks at fp32 weights in host memory where nothing commits.
    host_weights = 0 if dtype == "fp32" else sum(-(-n * 2 // 128) * 128 for n in SIZES)
    assert held.host_weight_bytes == host_weights
    train(net, optimizer)
    before = optimizer._traffic()
    train(net, optimizer, 3)
    after = optimizer._traffic()
    moved = sum(c.family.state_bytes(c.plan.elements) for c in chunks)
    weights = 0 if dtype == "fp32" else 2 * sum(SIZES)
    assert after.bytes_up - before.bytes_up == 3 * moved
    assert after.bytes_down - before.bytes_down == 3 * (moved + weights)
    assert after.chunks_updated - before.chunks_updated == 3 * len(chunks)


def test_states_are_where_the_accelerator_copies_from(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    class Counted(PinnedBlock):
        def __init__(self, nbytes: int, *given: Any) -> None:  # noqa: ANN401
            taken.append(nbytes)
            super().__init__(nbytes, *given)

    make_remote(monkeypatch)
    monkeypatch.setattr("tensorstow.step.optimizer_links.PinnedBlock", Counted)
    optimizer = make_there(Vectors(SIZES), states=0.5)
    held = optimizer._memory()
    assert held.ring_bytes in taken
    assert held.ring_bytes + held.ram_bytes <= sum(taken)
    taken.clear()
    make(Vectors(SIZES), states=0.5)
    assert taken == []


def test_a_step_that_commits_brings_fp32_weights_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(monkeypatch, update_on="device", dir=tmp_path, commit_every=2)
    train(net, optimizer)  # 1
    moved = []
    for _ in range(4):
        before = optimizer._traffic().bytes_down
        train(net, optimizer)
        moved.append(optimizer._traffic().bytes_down - before)
    states = sum(c.family.state_bytes(c.plan.elements) for c in optimizer._states().chunks)
    assert moved[1] == moved[3] == states
    assert moved[0] == moved[2] >= states + 4 * sum(SIZES)
    optimizer.close()


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_what_a_step_holds_is_let_go_behind_it(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(monkeypatch, update_on="device", overlap=overlap)
    train(net, optimizer)
    seen: list[StorageWeakRef] = []
    for part in net.parts:
        part.register_hook(lambda g: seen.append(StorageWeakRef(g.untyped_storage())))
    train(net, optimizer)
    optimizer.zero_grad()
    weights = [StorageWeakRef(part.data.untyped_storage()) for part in net.parts]
    for part in net.parts:
        part.data = part.data.clone()
    gc.collect()
    assert len(seen) == len(SIZES)
    assert [each.expired() for each in (*seen, *weights)] == [True] * 2 * len(SIZES)
    optimizer.close()


@pytest.mark.parametrize("where", ["device", 0.5, "hybrid", "auto"])
def test_chunks_are_handed_over_beside_backward_and_few_at_a_time(
    where: UpdateOn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the updater; not while shares are measured, which compares the sides beside nothing."""
    want, net = Vectors(SIZES), Vectors(SIZES)
    train(want, make(want), 5)
    make_remote(monkeypatch)
    optimizer = make_there(net, overlap="backward", update_on=where)
    updater = updater_of(optimizer)
    in_backward: list[bool] = []
    add = updater._pipeline.add_chunk_gradients

    def counted(chunk: int, pieces: Any) -> None:  # noqa: ANN401
        if chunk in updater._chunks:  # others are the host's, by its feed
            in_backward.append(is_running)
            assert updater._ahead < MOST_DEVICE_SLOTS
        add(chunk, pieces)

    monkeypatch.setattr(updater._pipeline, "add_chunk_gradients", counted)
    beside = []
    for _ in range(5):
        is_running = True
        optimizer.zero_grad()
        torch.autograd.backward(net())
        is_running = False
        beside.append(any(in_backward))
        in_backward.clear()
        settled = optimizer._params().update_router.share_tuner.is_final
        optimizer.step()
        in_backward.clear()
        assert not beside[-1] or settled
    assert all(beside) or where in {"hybrid", "auto"}  # whose shares are as fast as the sides
    assert same(net, want)
    optimizer.close()


def test_gradients_of_the_hosts_chunks_come_down_beside_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, optimizer = make_away(monkeypatch, overlap="backward", update_on=0.5, states="ram")
    train(net, optimizer)
    (feed,) = optimizer._params().update_router.device_feeds
    sent: list[int] = []
    send = feed.send
    monkeypatch.setattr(feed, "send", lambda chunk: (sent.append(chunk), send(chunk)))
    optimizer.zero_grad()
    before = optimizer._traffic().bytes_down
    torch.autograd.backward(net())
    hosts = {chunk.number for chunk in optimizer._states().chunks} - set(
        optimizer._params().update_router.updaters[0]._chunks
    )
    assert hosts <= set(sent)
    assert optimizer._traffic().bytes_down > before
    optimizer.step()
    optimizer.close()


# --- a run that goes on ---


def stored(directory: Path, **given: Any) -> Vectors:  # noqa: ANN401
    """Train 3 steps in a store that commits every second, and stop; return the net."""
    net = Vectors(SIZES, torch.bfloat16)
    optimizer = make(net, dir=directory, commit_every=2, **given)
    train(net, optimizer, 3)
    stop(optimizer)  # the third step is lost
    return net


def test_where_a_run_cannot_go_on_as_it_was_it_says_so(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        make_remote(patch)
        stored(tmp_path, update_on="device")
        beside = make(Vectors(SIZES, torch.bfloat16), dir=tmp_path, overlap="forward")
        with pytest.raises(OptionError, match=r'was written with .* and overlap="forward"'):
            beside.resume()
        beside.close()
    on_host = make(Vectors(SIZES, torch.bfloat16), dir=tmp_path)
    with pytest.raises(OptionError, match=r'host memory.*set update_on="host"'):
        on_host.resume()
    on_host.close()
    said = make(Vectors(SIZES, torch.bfloat16), dir=tmp_path, update_on="host", overlap="forward")
    assert said.resume() == 2
    said.close()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_commit_by_hand_has_what_others_wrote(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(
        monkeypatch, DTYPES[dtype], update_on="device", dir=tmp_path, commit_every=None
    )
    train(net, optimizer, 2)
    with torch.no_grad():
        net.parts[2].fill_(0.25)
    optimizer.commit()
    optimizer.close()
    other = Vectors(SIZES, DTYPES[dtype], seed=1)
    again = make_there(other, dir=tmp_path, commit_every=None)
    assert again.resume() == 2
    assert same(other, net)
    again.close()


# --- what goes wrong ---


def test_damage_is_found_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, update_on="device")
    train(net, optimizer)
    optimizer.synchronize()
    store = optimizer._states()
    chunk = store.chunks[2]
    file, offset = store.pipeline.stored.place(chunk)
    store.storage.file(file).write(torch.ones(4096, dtype=torch.uint8), offset).wait()
    with pytest.raises(DamageError, match="their checksum does not fit"):
        train(net, optimizer)
    optimizer.close()


def test_an_optimizer_goes_with_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, update_on="device")
    train(net, optimizer, 2)
    watchers = [weakref.ref(optimizer._params().store), weakref.ref(updater_of(optimizer))]
    del optimizer
    gc.collect()
    assert [watcher() for watcher in watchers] == [None, None]


def test_parameters_in_host_memory_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"Parameter 0 of group 0 is on cpu.*update_on=.host."):
        make_there(Vectors(SIZES))
    make_remote(monkeypatch, lambda p: p.numel() != 500)
    with pytest.raises(OptionError, match=r"Parameter 2 of group 0 is on cpu"):
        make_there(Vectors(SIZES))
    monkeypatch.undo()
    with pytest.raises(OptionError, match=r"update_on='gpu' was given"):
        make(Vectors(SIZES), update_on="gpu")


# --- copies that are not waited for ---


def not_released_in_time(patch: pytest.MonkeyPatch) -> None:
    """Give a chunk back before its states have come down."""
    patch.setattr(Later, "query", lambda _: True)


def not_joined(patch: pytest.MonkeyPatch) -> None:
    """Update what has not come up yet."""
    patch.setattr(LateLink, "join", lambda *_: None)


def not_behind_the_update(patch: pytest.MonkeyPatch) -> None:
    """Let states come down while they still go up: the host does not know that those are over."""
    d2h = LateLink.d2h
    patch.setattr(LateLink, "d2h", lambda self, pairs, _: d2h(self, pairs, ()))


def one_slot_for_all(patch: pytest.MonkeyPatch) -> None:
    """Send the next chunk up over one that has not come down."""
    started = DeviceUpdater._start

    def start(self: DeviceUpdater, *given: Any, **more: Any) -> None:  # noqa: ANN401
        slot = self._free[-1]
        started(self, *given, **more)
        self._free.append(slot)

    patch.setattr(DeviceUpdater, "_start", start)


def weights_left_up(patch: pytest.MonkeyPatch) -> None:
    """Do not bring 16-bit weights down."""
    d2h = LateLink.d2h
    states = {torch.float32, torch.int16}
    patch.setattr(
        LateLink,
        "d2h",
        lambda self, pairs, after: d2h(self, [p for p in pairs if p[0].dtype in states], after),
    )


def never_given_zeros(patch: pytest.MonkeyPatch) -> None:
    """Begin with what a slot held before: the pipeline clears what was never written."""
    begin = DeviceUpdater._start

    def begin_dirty(self: DeviceUpdater, chunk: Chunk, ring_slot: int) -> None:
        if ring_slot >= 0:
            self._streams_of(chunk, ring_slot)[0].fill_(1.0)
        begin(self, chunk, ring_slot)

    patch.setattr(DeviceUpdater, "_start", begin_dirty)


@pytest.mark.parametrize(
    "breaks",
    [
        not_released_in_time,
        not_joined,
        not_behind_the_update,
        one_slot_for_all,
        weights_left_up,
        never_given_zeros,
    ],
)
def test_each_of_these_is_seen(
    breaks: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    want, net = Vectors(SIZES, torch.bfloat16), Vectors(SIZES, torch.bfloat16)
    reference = make(want)
    train(want, reference, 3)
    make_remote(monkeypatch)
    optimizer = make_there(net, ram_budget=TIGHT)
    link = link_of(optimizer)
    breaks(monkeypatch)
    try:
        train(net, optimizer, 3)
        with torch.no_grad():
            net.parts[0].mul_(1.0)
        seen = not (same(net, want) and same_states(optimizer, reference))
    except (AssertionError, DamageError, RuntimeError):
        seen = True
    assert seen
    for stream in (link.d2h_stream, link.h2d_stream):
        stream.work.clear()  # or its end would be told what was seen once more
    optimizer.close()


def test_what_is_broken_above_is_whole_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    want, net = Vectors(SIZES, torch.bfloat16), Vectors(SIZES, torch.bfloat16)
    reference = make(want)
    train(want, reference, 3)
    make_remote(monkeypatch)
    optimizer = make_there(net, ram_budget=TIGHT)
    train(net, optimizer, 3)
    with torch.no_grad():
        net.parts[0].mul_(1.0)
    assert same(net, want)
    assert same_states(optimizer, reference)
    optimizer.close()
