"""Memory of our own: aligned, zero, and not inherited where that would be unsafe."""

import mmap
import os
from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import BudgetError
from tensorstow.io import arena as arena_module
from tensorstow.io.arena import PAGE, Arena

HUGE_PAGE = 2 << 20


@pytest.mark.parametrize("nbytes", [0, 1, PAGE, PAGE + 1, 3 << 20])
def test_size_is_whole_pages_and_starts_on_a_huge_one(nbytes: int) -> None:
    arena = Arena(nbytes, in_children=False)
    assert arena.nbytes == max(1, -(-nbytes // PAGE)) * PAGE
    assert arena.address % HUGE_PAGE == 0


def test_tensors_lie_where_they_were_asked_and_start_as_zeros() -> None:
    arena = Arena(4 * PAGE, in_children=False)
    first = arena.tensor(0, 10, torch.float32)
    last = arena.tensor(4 * PAGE - 8, 4, torch.bfloat16)
    assert first.data_ptr() == arena.address
    assert last.data_ptr() == arena.address + 4 * PAGE - 8
    assert not first.any()
    assert not last.any()


def test_a_tensor_keeps_the_mapping() -> None:
    tensor = Arena(PAGE, in_children=False).tensor(0, 1024, torch.float32)
    tensor.fill_(3)
    assert tensor.sum() == 3 * 1024


def test_a_tensor_past_the_mapping_is_refused() -> None:
    arena = Arena(PAGE, in_children=False)
    with pytest.raises(ValueError, match="buffer"):
        arena.tensor(HUGE_PAGE, PAGE, torch.float32)


def test_more_than_the_system_has_is_an_error_with_the_size() -> None:
    with pytest.raises(BudgetError, match=r"4\.0 PiB of host memory"):
        Arena(1 << 52, in_children=False)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("in_children", [True, False])
def test_a_forked_child_has_it_only_where_asked(in_children: bool) -> None:  # noqa: FBT001
    arena = Arena(PAGE, in_children=in_children)
    tensor = arena.tensor(0, 1, torch.float32)
    tensor.fill_(1)
    pid = os.fork()
    if pid == 0:
        os._exit(int(tensor.item()))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == int(in_children)
    assert tensor.item() == 1


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_that_lets_go_of_it_unmaps_nothing_else() -> None:
    arenas = [Arena(1 << 20, in_children=False) for _ in range(8)]
    pid = os.fork()
    if pid == 0:
        own = [mmap.mmap(-1, 3 << 20) for _ in range(16)]  # would fill the holes, were there any
        arenas.clear()
        for block in own:
            block.write(b"x" * len(block))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_no_huge_pages_in_the_kernel_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    assert Arena(PAGE, in_children=True).tensor(0, 1, torch.float32).item() == 0


def test_advice_that_is_needed_and_refused_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_WIPE_ON_FORK", 9999)
    with pytest.raises(OSError, match="Invalid argument"):
        Arena(PAGE, in_children=False)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_a_forked_child_writes_stays_with_it() -> None:
    tensor = Arena(PAGE, in_children=True).tensor(0, 1, torch.float32)
    pid = os.fork()
    if pid == 0:
        tensor.fill_(7)
        os._exit(0)
    os.waitpid(pid, 0)
    assert tensor.item() == 0


def test_large_arenas_lie_in_huge_pages_where_the_system_has_them() -> None:
    arena = Arena(4 * HUGE_PAGE, in_children=True)
    arena.tensor(0, HUGE_PAGE, torch.float32).fill_(1)
    with Path("/sys/kernel/mm/transparent_hugepage/enabled").open() as setting:
        if "[never]" in setting.read():
            pytest.skip("huge pages are switched off here")
    assert _anonymous_huge_bytes(arena.address) > 0


def _anonymous_huge_bytes(address: int) -> int:
    inside = False
    with Path("/proc/self/smaps").open() as maps:
        for line in maps:
            if "-" in (span := line.split()[0]) and not span.endswith(":"):
                low, high = (int(part, 16) for part in span.split("-"))
                inside = low <= address < high
            elif inside and line.startswith("AnonHugePages:"):
                return int(line.split()[1]) * 1024
    return 0


@pytest.mark.parametrize("nbytes", [PAGE, 3 << 20, (2 << 20) + PAGE])
def test_pages_move_to_an_arena_of_the_same_size(nbytes: int) -> None:
    arenas = [Arena(nbytes, in_children=False) for _ in range(3)]
    bytes_of = [arena.tensor(0, nbytes, torch.uint8) for arena in arenas]
    bytes_of[0].fill_(7)
    bytes_of[1].fill_(8)
    assert arenas[1].take_pages(arenas[0])
    assert bool(bytes_of[1].eq(7).all())
    assert not bytes_of[0].any()
    for _ in range(3):  # there and back, also when a mapping was cut by it before
        assert arenas[2].take_pages(arenas[1])
        assert arenas[1].take_pages(arenas[2])
    assert bool(bytes_of[1].eq(7).all())
    assert not bytes_of[2].any()
    arenas[1].drop()
    assert not bytes_of[1].any()
    bytes_of[0].fill_(1)
    assert int(bytes_of[0][-1]) == 1


def test_pages_stay_where_the_kernel_cannot_move_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (Arena(PAGE, in_children=False) for _ in range(2))
    first.tensor(0, 1, torch.uint8).fill_(7)
    second.tensor(0, 1, torch.uint8).fill_(8)
    monkeypatch.setattr(arena_module, "_MOVE_PAGES", 1 << 20)
    assert not second.take_pages(first)
    assert int(first.tensor(0, 1, torch.uint8)) == 7
    assert int(second.tensor(0, 1, torch.uint8)) == 8


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_pages_that_moved_are_not_in_children_either() -> None:
    first, second = (Arena(PAGE, in_children=False) for _ in range(2))
    first.tensor(0, 1, torch.uint8).fill_(7)
    assert second.take_pages(first)
    pid = os.fork()
    if pid == 0:
        os._exit(int(second.tensor(0, 1, torch.uint8)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
