"""Shards are copied before they are asked for, in few buffers, and discarded when they are old."""

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorstow.base.update_on import Overlap, timing_of
from tensorstow.fsdp import device_cache
from tensorstow.fsdp.h2d_prefetch import H2DPrefetcher
from tensorstow.fsdp.shard_storage import DiskShard, Prefetcher, ShardStorage
from tensorstow.io.device_link import DeviceEvent, Pairs, PlainLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.memory.buffer_pool import BufferPool
from tensorstow.step.call_lock import CallLock

CPU = torch.device("cpu")
ROWS = 8


@pytest.fixture(autouse=True)
def _no_other_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cache, "_CACHES", weakref.WeakSet())


class Counted(PlainLink):
    """A link that remembers what it has taken up."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[float] = []

    def h2d(self, pairs: Pairs, after: Iterable[DeviceEvent] = ()) -> DeviceEvent:
        self.copied += [float(source[0]) for _, source in pairs]
        return super().h2d(pairs, after)


def made(
    count: int,
    *,
    link: PlainLink,
    ahead: int = 1,
    overlap: Overlap = "none",
    stay: int | None = None,
) -> tuple[H2DPrefetcher, list[ShardStorage]]:
    """Return a prefetcher of units of one shard each, whose values are their numbers.

    Copies of the first ``stay`` of them stay on the device.
    """
    limit = None if stay is None else 128 * stay
    prefetcher = H2DPrefetcher(link, ahead=ahead, timing=timing_of(overlap), limit_bytes=limit)
    shards = []
    for number in range(count):
        block = PinnedBlock(4 * ROWS, CPU, link.synchronize)
        shards.append(ShardStorage(block.tensor(0, ROWS, torch.float32).data, ROWS, block))
        shards[-1].local_shard.fill_(number)
        prefetcher.add_unit(shards[-1:], [torch.float32], None)
    if prefetcher.cache is not None:
        prefetcher.cache.assume(0)
    return prefetcher, shards


def gather(prefetcher: H2DPrefetcher, shard: ShardStorage) -> torch.Tensor:
    """Do what FSDP2 does."""
    got = prefetcher.all_gather_input(shard, torch.float32).clone()
    prefetcher.record_copied(shard)
    return got


def test_what_comes_next_is_copied_ahead() -> None:
    link = Counted()
    prefetcher, shards = made(4, link=link)
    for _ in range(2):
        for shard in shards:
            assert gather(prefetcher, shard).eq(shard.local_shard).all()
    # The last of the second round is followed by the first, as that of the first was.
    assert link.copied == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    prefetcher.all_gather_input(shards[0], torch.float32)
    assert link.copied[9:] == [1]
    prefetcher.record_copied(shards[0])
    assert link.copied[9:] == [1]
    gather(prefetcher, shards[1])
    assert link.copied[9:] == [1, 2]


def test_buffers_are_few_and_used_again() -> None:
    prefetcher, shards = made(6, link=PlainLink(), ahead=2)
    places = {
        prefetcher.all_gather_input(c, torch.float32).data_ptr()
        for _ in range(3)
        for c in used(prefetcher, shards)
    }
    assert len(places) == 3
    assert prefetcher.buffers.device_bytes == 3 * 128
    assert (prefetcher.buffers.staging_bytes, prefetcher.buffers.pinned_bytes) == (0, 0)


def used(prefetcher: H2DPrefetcher, shards: list[ShardStorage]) -> Iterable[ShardStorage]:
    for shard in shards:
        yield shard
        prefetcher.record_copied(shard)


def test_a_unit_that_is_gathered_twice_is_copied_once() -> None:
    """The last one of a forward is the first of its backward."""
    link = Counted()
    prefetcher, shards = made(3, link=link, ahead=0)
    for _ in range(2):
        for number in (0, 1, 2, 2, 1, 0):
            gather(prefetcher, shards[number])
        prefetcher.discard()
    assert link.copied == [0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 0]


@pytest.mark.parametrize("stay", [0, 2, 3])
def test_a_unit_whose_copy_stays_is_copied_once_in_a_step(stay: int) -> None:
    link = Counted()
    prefetcher, shards = made(4, link=link, ahead=0, stay=stay)
    for step in range(3):
        link.copied.clear()
        for _ in range(2):  # two micro-batches
            for number in (0, 1, 2, 3, 3, 2, 1, 0):
                assert gather(prefetcher, shards[number]).eq(number + step).all()
        counts = [link.copied.count(number + step) for number in range(4)]
        assert counts[:stay] == [1] * stay
        assert min(counts[stay:]) >= 2
        prefetcher.discard()
        for shard in shards:
            shard.local_shard.add_(1)
    assert prefetcher.buffers.own_bytes == 128 * stay
    prefetcher.buffers.free_own(list(prefetcher._units.values()))
    assert prefetcher.buffers.own_bytes == 0


def test_a_copy_that_stays_is_old_when_its_weight_is_written() -> None:
    prefetcher, shards = made(2, link=PlainLink(), stay=2)
    for shard in shards:
        gather(prefetcher, shard)
    with shards[0].access(write=True):
        shards[0].local_shard.fill_(7)
    assert gather(prefetcher, shards[0]).eq(7).all()


@pytest.mark.parametrize("stay", [0, 2])
def test_a_copy_is_old_when_what_state_dict_returns_is_written(stay: int) -> None:
    """Which nobody is told of."""
    prefetcher, shards = made(2, link=PlainLink(), stay=stay)
    for _ in range(2):
        for shard in shards:
            gather(prefetcher, shard)
    prefetcher.prefetch()
    for shard in shards:
        shard.local_shard.detach().view(-1).mul_(0).add_(7)
    for shard in shards:
        assert gather(prefetcher, shard).eq(7).all()


def test_what_backward_does_not_gather_has_no_copy_that_stays() -> None:
    prefetcher, _ = made(1, link=PlainLink(), stay=9)
    assert prefetcher.cache is not None
    before = prefetcher.cache.chosen_bytes
    shard = ShardStorage(torch.zeros(ROWS), ROWS)
    prefetcher.add_unit([shard], [torch.float32], None, is_gathered_twice=False)
    prefetcher.cache.assume(0)
    assert prefetcher.cache.chosen_bytes == before > 0


def test_copies_that_stay_do_not_give_way_to_others() -> None:
    link = Counted()
    prefetcher, shards = made(4, link=link, ahead=0, stay=2)
    gather(prefetcher, shards[0])
    gather(prefetcher, shards[1])
    for shard in shards:  # all at once: more than there are buffers for all
        prefetcher.all_gather_input(shard, torch.float32)
    assert link.copied == [0, 1, 2, 3]


def test_more_gathers_than_buffers_are_copied_at_once() -> None:
    link = Counted()
    prefetcher, shards = made(4, link=link, ahead=0)
    got = [prefetcher.all_gather_input(shard, torch.float32) for shard in shards]
    assert [float(g[0]) for g in got] == [0, 1, 2, 3]
    assert link.copied == [0, 1]
    for shard in shards:
        prefetcher.record_copied(shard)


def test_a_gather_that_did_not_end_is_begun_again() -> None:
    prefetcher, shards = made(2, link=PlainLink())
    prefetcher.all_gather_input(shards[0], torch.float32)
    shards[0].local_shard.fill_(9)
    assert gather(prefetcher, shards[0]).eq(9).all()


@pytest.mark.parametrize("how", ["step", "write"])
def test_what_was_copied_ahead_of_a_change_is_forgotten(how: str) -> None:
    link = Counted()
    prefetcher, shards = made(2, link=link)
    for shard in (*shards, *shards, shards[0]):
        gather(prefetcher, shard)
    assert link.copied[-1] == 1  # ahead
    if how == "step":
        prefetcher.discard()
        shards[1].local_shard.fill_(5)
        prefetcher.prefetch()
    else:
        with shards[1].access(write=True):
            shards[1].local_shard.fill_(5)
    assert gather(prefetcher, shards[1]).eq(5).all()


class Numbered(PlainLink):
    """A link whose copies are over when somebody waits for them, as far as the host knows."""

    def __init__(self) -> None:
        super().__init__()
        self.given = self.over = 0

    def h2d(self, pairs: Pairs, after: Iterable[DeviceEvent] = ()) -> DeviceEvent:
        super().h2d(pairs, after)
        self.given += 1
        return Later(self, self.given)


class Later:
    """Behind the copies of a link up to a number."""

    def __init__(self, link: Numbered, number: int) -> None:
        self.link, self.number = link, number

    def query(self) -> bool:
        return self.link.over >= self.number

    def synchronize(self) -> None:
        self.link.over = max(self.link.over, self.number)


@pytest.mark.parametrize("how", ["step", "write"])
def test_a_copy_that_gave_way_to_another_is_waited_for_too(how: str) -> None:
    link = Numbered()
    prefetcher, shards = made(4, link=link)
    for _ in range(2):
        for shard in shards:
            gather(prefetcher, shard)
        prefetcher.discard()
    prefetcher.all_gather_input(shards[0], torch.float32)  # and 1 ahead, whose buffer 3 gets
    copied = link.given
    prefetcher.all_gather_input(shards[3], torch.float32)
    assert link.given == copied + 1
    assert link.over < copied
    if how == "step":
        prefetcher.discard()
    else:
        with shards[1].access(write=True):
            pass
    assert link.over >= copied


def test_what_a_step_is_followed_by_is_copied_at_its_end() -> None:
    link = Counted()
    prefetcher, shards = made(3, link=link)
    for _ in range(2):
        for shard in shards:
            gather(prefetcher, shard)
        prefetcher.discard()
        prefetcher.prefetch()
    assert link.copied == [0, 1, 2, 0, 1, 2, 0]


def test_beside_forward_only_what_is_updated_is_copied_ahead() -> None:
    link = Counted()
    prefetcher, shards = made(3, link=link, overlap="forward")
    waited: list[int] = []
    updated: set[int] = set()
    for number, shard in enumerate(shards):
        shard.before_read = lambda number=number: waited.append(number)  # type: ignore[misc]
        shard.is_updated = lambda number=number: number in updated  # type: ignore[misc]
    for _ in range(2):
        for shard in shards:
            gather(prefetcher, shard)
        prefetcher.discard()
        prefetcher.prefetch()
    assert link.copied == [0, 1, 2, 0, 1, 2]
    waited.clear()
    prefetcher.all_gather_input(shards[0], torch.float32)
    assert set(waited) == {0}
    assert link.copied == [0, 1, 2, 0, 1, 2, 0]
    prefetcher.record_copied(shards[0])
    updated |= {2}
    prefetcher.all_gather_input(shards[1], torch.float32)
    assert set(waited) == {0, 1, 2}
    assert link.copied == [0, 1, 2, 0, 1, 2, 0, 1, 2]


def test_in_a_backward_nothing_is_copied_ahead_that_may_be_updated() -> None:
    link = Counted()
    prefetcher, shards = made(2, link=link)
    x = torch.zeros(1, requires_grad=True)

    def gathered(shard: ShardStorage, _: torch.Tensor) -> None:
        gather(prefetcher, shard)

    def backward(*numbers: int) -> None:
        y = x * 1
        for number in reversed(numbers):
            y = y * 1
            y.register_hook(partial(gathered, shards[number]))
        y.backward()

    for _ in range(3):
        gather(prefetcher, shards[0])
        gather(prefetcher, shards[1])
        backward(1, 0)
    assert link.copied[-1] == 0  # not 0 of the next forward, nor 1
    assert not prefetcher._copies


def test_beside_backward_a_copy_does_not_stay_behind_its_update() -> None:
    link = Counted()
    prefetcher, shards = made(2, link=link, overlap="backward", stay=2)
    x = torch.zeros(1, requires_grad=True)

    def gathered(shard: ShardStorage, _: torch.Tensor) -> None:
        gather(prefetcher, shard)

    for _ in range(2):  # micro-batches; the first updates nothing, which is not known here
        y = x * 1
        for shard in shards:
            gather(prefetcher, shard)
            y = y * 1
            y.register_hook(partial(gathered, shard))
        y.backward()
        assert not prefetcher._copies
    assert sorted(link.copied) == [0, 0, 1, 1]


def test_a_buffer_is_pinned_for_the_copy_alone(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 1 << 20, 1 << 20)
    disk = Prefetcher(1)
    link = Counted()
    prefetcher = H2DPrefetcher(link, ahead=1, timing=timing_of("none"))
    shards = []
    for number in range(3):
        buffer = pool.add(4096)
        shards.append(DiskShard(buffer.tensor(0, (ROWS,), torch.float32), ROWS, buffer, disk))
        with shards[-1].access(write=True):
            shards[-1].local_shard.fill_(number)
        prefetcher.add_unit(shards[-1:], [torch.bfloat16], disk)
    for _ in range(2):
        for number, shard in enumerate(shards):
            got = prefetcher.all_gather_input(shard, torch.bfloat16)
            assert got.dtype == torch.bfloat16
            assert got.eq(number).all()
            assert shard.pager is not None
            assert shard.pager.pins == 0
            prefetcher.record_copied(shard)
    assert (prefetcher.buffers.device_bytes, prefetcher.buffers.staging_bytes) == (256, 256)
    assert shards[0].bytes_up == 3 * 2 * ROWS  # the last ahead of a third round


def test_a_unit_partly_in_buffers_pins_them_too(tmp_path: Path) -> None:
    pool = BufferPool([tmp_path], 1 << 20, 4096)  # room for one: a buffer that is not read is lost
    disk = Prefetcher(0)
    prefetcher = H2DPrefetcher(Counted(), ahead=0, timing=timing_of("none"))
    units = []
    for number in range(3):
        buffer = pool.add(4096)
        read = DiskShard(buffer.tensor(0, (ROWS,), torch.float32), ROWS, buffer, disk)
        with read.access(write=True):
            read.local_shard.fill_(number)
        units.append([ShardStorage(torch.full((ROWS,), 7.0), ROWS), read])
        prefetcher.add_unit(units[-1], [torch.bfloat16] * 2, disk)
    for _ in range(2):
        for number, unit in enumerate(units):
            for shard, value in zip(unit, (7, number), strict=True):
                assert prefetcher.all_gather_input(shard, torch.bfloat16).eq(value).all()
            for shard in unit:
                prefetcher.record_copied(shard)


# --- a gather that another thread makes, of a backward that has raised ---


class Optimizer:
    """What a prefetcher asks of one."""

    def __init__(self) -> None:
        self.call_lock = CallLock()
        self._alone = self.call_lock.alone
        self.hooks: dict[str, Callable[..., None]] = {}

    def _wait_for_gradient(self) -> bool:
        return False

    def register_step_pre_hook(self, hook: Callable[..., None]) -> None:
        self.hooks["before step"] = hook

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        self.hooks["behind step"] = hook

    def _register_rewrite_hook(self, hook: Callable[..., None]) -> None:
        self.hooks["rewrite"] = hook


def watched(link: PlainLink) -> tuple[H2DPrefetcher, list[ShardStorage], Optimizer, nn.Module]:
    """Return prefetcher that know in which order units are gathered."""
    prefetcher, shards = made(3, link=link)
    optimizer, model = Optimizer(), nn.Module()
    prefetcher.register(model, optimizer)  # type: ignore[arg-type]  # all that is asked of it
    for shard in (*shards, *shards, *shards):
        gather(prefetcher, shard)
    prefetcher.discard()
    prefetcher._order.last = (prefetcher._units[id(shards[1])], prefetcher._units[id(shards[2])])
    return prefetcher, shards, optimizer, model


def test_resume_waits_for_a_gather_that_has_begun() -> None:
    inside, gate = threading.Event(), threading.Event()

    class Slow(PlainLink):
        def h2d(self, pairs: Pairs, after: Iterable[DeviceEvent] = ()) -> DeviceEvent:
            mark = super().h2d(pairs, after)
            if threading.current_thread() is late and pairs[0][1][0] == 1:  # the one ahead
                inside.set()
                assert gate.wait(30)
            return mark

    seen: list[float] = []
    late = threading.Thread(target=lambda: seen.extend(gather(prefetcher, shards[0]).tolist()))
    prefetcher, shards, optimizer, model = watched(Slow())

    def resume() -> None:
        optimizer.hooks["rewrite"](True)  # noqa: FBT003  # gradients go too
        for shard in shards:
            shard.local_shard.fill_(9)

    late.start()
    assert inside.wait(30)
    threading.Timer(0.2, gate.set).start()
    optimizer.call_lock.run("resume", resume)
    late.join()
    assert seen == [0] * ROWS, "what it gathered is what was there when it began"
    for shard in shards:
        assert gather(prefetcher, shard).eq(9).all()
    del model


def test_what_is_gathered_between_the_hooks_of_a_step_is_not_kept() -> None:
    prefetcher, shards, optimizer, model = watched(PlainLink())
    optimizer.hooks["before step"](optimizer)
    prefetcher._order.last = (prefetcher._units[id(shards[1])], prefetcher._units[id(shards[2])])
    gather(prefetcher, shards[0])  # and the next one ahead
    for shard in shards:
        shard.local_shard.fill_(9)
    optimizer.hooks["behind step"]()
    for shard in shards:
        assert gather(prefetcher, shard).eq(9).all()
    del model


def test_what_is_gathered_while_a_weight_is_written_is_not_kept() -> None:
    prefetcher, shards, _, model = watched(PlainLink())
    with shards[1].access(write=True):
        gather(prefetcher, shards[0])  # and the next one ahead
        shards[1].local_shard.fill_(9)
    assert gather(prefetcher, shards[1]).eq(9).all()
    del model
