"""Uploads: what is copied before it is asked for, in how many buffers, and what is forgotten."""

import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorstow.fsdp.shard_storage import DiskShard, HostShard, Prefetcher
from tensorstow.fsdp.uploads import Uploads
from tensorstow.io.buffer_pool import BufferPool
from tensorstow.io.device_link import DeviceEvent, Pairs, PlainLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.step.calls import Calls

CPU = torch.device("cpu")
ROWS = 8


class Counted(PlainLink):
    """A link that remembers what it has taken up."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[float] = []

    def h2d(self, pairs: Pairs, after: Iterable[DeviceEvent] = ()) -> DeviceEvent:
        self.copied += [float(source[0]) for _, source in pairs]
        return super().h2d(pairs, after)


def made(
    count: int, *, link: PlainLink, ahead: int = 1, beside_forward: bool = False
) -> tuple[Uploads, list[HostShard]]:
    """Return uploads of units of one cell, whose values are their numbers."""
    uploads = Uploads(link, ahead=ahead, beside_forward=beside_forward)
    cells = []
    for number in range(count):
        block = PinnedBlock(4 * ROWS, CPU, link.synchronize)
        cells.append(HostShard(block.tensor(0, ROWS, torch.float32).data, ROWS, block))
        cells[-1].home.fill_(number)
        uploads.add(cells[-1:], [torch.float32], None)
    return uploads, cells


def gather(uploads: Uploads, cell: HostShard) -> torch.Tensor:
    """Do what FSDP2 does."""
    got = uploads.take(cell, torch.float32).clone()
    uploads.used(cell)
    return got


def test_what_comes_next_is_copied_ahead() -> None:
    link = Counted()
    uploads, cells = made(4, link=link)
    for _ in range(2):
        for cell in cells:
            assert gather(uploads, cell).eq(cell.home).all()
    # The last of the second round is followed by the first, as that of the first was.
    assert link.copied == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    uploads.take(cells[0], torch.float32)
    assert link.copied[9:] == [1]
    uploads.used(cells[0])
    assert link.copied[9:] == [1]
    gather(uploads, cells[1])
    assert link.copied[9:] == [1, 2]


def test_buffers_are_few_and_used_again() -> None:
    uploads, cells = made(6, link=PlainLink(), ahead=2)
    places = {
        uploads.take(c, torch.float32).data_ptr() for _ in range(3) for c in used(uploads, cells)
    }
    assert len(places) == 3
    assert uploads.device_bytes == 3 * 128
    assert (uploads.staging_bytes, uploads.pinned_bytes) == (0, 0)


def used(uploads: Uploads, cells: list[HostShard]) -> Iterable[HostShard]:
    for cell in cells:
        yield cell
        uploads.used(cell)


def test_a_unit_that_is_gathered_twice_is_copied_once() -> None:
    """The last one of a forward is the first of its backward."""
    link = Counted()
    uploads, cells = made(3, link=link, ahead=0)
    for _ in range(2):
        for number in (0, 1, 2, 2, 1, 0):
            gather(uploads, cells[number])
        uploads.forget()
    assert link.copied == [0, 1, 2, 2, 1, 0, 0, 1, 2, 1, 0]


def test_more_gathers_than_buffers_are_copied_at_once() -> None:
    link = Counted()
    uploads, cells = made(4, link=link, ahead=0)
    got = [uploads.take(cell, torch.float32) for cell in cells]
    assert [float(g[0]) for g in got] == [0, 1, 2, 3]
    assert link.copied == [0, 1]
    for cell in cells:
        uploads.used(cell)


def test_a_gather_that_did_not_end_is_begun_again() -> None:
    uploads, cells = made(2, link=PlainLink())
    uploads.take(cells[0], torch.float32)
    cells[0].home.fill_(9)
    assert gather(uploads, cells[0]).eq(9).all()


@pytest.mark.parametrize("how", ["step", "write"])
def test_what_was_copied_ahead_of_a_change_is_forgotten(how: str) -> None:
    link = Counted()
    uploads, cells = made(2, link=link)
    for cell in (*cells, *cells, cells[0]):
        gather(uploads, cell)
    assert link.copied[-1] == 1  # ahead
    if how == "step":
        uploads.forget()
        cells[1].home.fill_(5)
        uploads.begin()
    else:
        with cells[1].access(write=True):
            cells[1].home.fill_(5)
    assert gather(uploads, cells[1]).eq(5).all()


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
    uploads, cells = made(4, link=link)
    for _ in range(2):
        for cell in cells:
            gather(uploads, cell)
        uploads.forget()
    uploads.take(cells[0], torch.float32)  # and 1 ahead, whose buffer 3 gets
    copied = link.given
    uploads.take(cells[3], torch.float32)
    assert link.given == copied + 1
    assert link.over < copied
    if how == "step":
        uploads.forget()
    else:
        with cells[1].access(write=True):
            pass
    assert link.over >= copied


def test_what_a_step_is_followed_by_is_copied_at_its_end() -> None:
    link = Counted()
    uploads, cells = made(3, link=link)
    for _ in range(2):
        for cell in cells:
            gather(uploads, cell)
        uploads.forget()
        uploads.begin()
    assert link.copied == [0, 1, 2, 0, 1, 2, 0]


def test_beside_forward_only_what_was_waited_for_is_copied_ahead() -> None:
    link = Counted()
    uploads, cells = made(3, link=link, beside_forward=True)
    waited: list[int] = []
    for number, cell in enumerate(cells):
        cell.before_read = lambda number=number: waited.append(number)  # type: ignore[misc]
    for _ in range(2):
        for cell in cells:
            gather(uploads, cell)
        uploads.forget()
        uploads.begin()
    assert link.copied == [0, 1, 2, 0, 1, 2]
    waited.clear()
    uploads.take(cells[0], torch.float32)
    assert set(waited) == {0}
    assert link.copied == [0, 1, 2, 0, 1, 2, 0]


def test_in_a_backward_nothing_is_copied_ahead_that_may_be_updated() -> None:
    link = Counted()
    uploads, cells = made(2, link=link)
    x = torch.zeros(1, requires_grad=True)

    def gathered(cell: HostShard, _: torch.Tensor) -> None:
        gather(uploads, cell)

    def backward(*numbers: int) -> None:
        y = x * 1
        for number in reversed(numbers):
            y = y * 1
            y.register_hook(partial(gathered, cells[number]))
        y.backward()

    for _ in range(3):
        gather(uploads, cells[0])
        gather(uploads, cells[1])
        backward(1, 0)
    assert link.copied[-1] == 0  # not 0 of the next forward, nor 1
    assert not uploads._under_way


def test_a_shelf_is_lent_for_the_copy_alone(tmp_path: Path) -> None:
    pool = BufferPool(tmp_path, 1 << 20, 1 << 20)
    prefetcher = Prefetcher(1)
    link = Counted()
    uploads = Uploads(link, ahead=1, beside_forward=False)
    cells = []
    for number in range(3):
        buffer = pool.add(4096)
        cells.append(DiskShard(buffer.tensor(0, (ROWS,), torch.float32), ROWS, buffer, prefetcher))
        with cells[-1].access(write=True):
            cells[-1].home.fill_(number)
        uploads.add(cells[-1:], [torch.bfloat16], prefetcher)
    for _ in range(2):
        for number, cell in enumerate(cells):
            got = uploads.take(cell, torch.bfloat16)
            assert got.dtype == torch.bfloat16
            assert got.eq(number).all()
            assert cell.pager is not None
            assert cell.pager.pins == 0
            uploads.used(cell)
    assert (uploads.device_bytes, uploads.staging_bytes) == (256, 256)
    assert cells[0].bytes_up == 3 * 2 * ROWS  # the last ahead of a third round


# --- a gather that another thread makes, of a backward that has raised ---


class Optimizer:
    """What uploads know of one."""

    def __init__(self) -> None:
        self.calls = Calls()
        self.alone = self.calls.alone
        self.hooks: dict[str, Callable[..., None]] = {}

    def register_step_pre_hook(self, hook: Callable[..., None]) -> None:
        self.hooks["before step"] = hook

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        self.hooks["behind step"] = hook

    def register_resume_hook(self, hook: Callable[..., None]) -> None:
        self.hooks["resume"] = hook


def watched(link: PlainLink) -> tuple[Uploads, list[HostShard], Optimizer, nn.Module]:
    """Return uploads that know in which order units are gathered."""
    uploads, cells = made(3, link=link)
    optimizer, model = Optimizer(), nn.Module()
    uploads.watch(model, optimizer)  # type: ignore[arg-type]  # all that is asked of it
    for cell in (*cells, *cells, *cells):
        gather(uploads, cell)
    uploads.forget()
    uploads._last = (uploads._of[id(cells[1])], uploads._of[id(cells[2])])
    return uploads, cells, optimizer, model


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
    late = threading.Thread(target=lambda: seen.extend(gather(uploads, cells[0]).tolist()))
    uploads, cells, optimizer, model = watched(Slow())

    def resume() -> None:
        optimizer.hooks["resume"]()
        for cell in cells:
            cell.home.fill_(9)

    late.start()
    assert inside.wait(30)
    threading.Timer(0.2, gate.set).start()
    optimizer.calls.run("resume", resume)
    late.join()
    assert seen == [0] * ROWS, "what it gathered is what was there when it began"
    for cell in cells:
        assert gather(uploads, cell).eq(9).all()
    del model


def test_what_is_gathered_between_the_hooks_of_a_step_is_not_kept() -> None:
    uploads, cells, optimizer, model = watched(PlainLink())
    optimizer.hooks["before step"]()
    uploads._last = (uploads._of[id(cells[1])], uploads._of[id(cells[2])])
    gather(uploads, cells[0])  # and the next one ahead
    for cell in cells:
        cell.home.fill_(9)
    optimizer.hooks["behind step"]()
    for cell in cells:
        assert gather(uploads, cell).eq(9).all()
    del model


def test_what_is_gathered_while_a_weight_is_written_is_not_kept() -> None:
    uploads, cells, _, model = watched(PlainLink())
    with cells[1].access(write=True):
        gather(uploads, cells[0])  # and the next one ahead
        cells[1].home.fill_(9)
    assert gather(uploads, cells[1]).eq(9).all()
    del model
