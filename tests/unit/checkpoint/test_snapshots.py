"""Snapshots: kept under a name, at the price of the disk that they hold."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from crash.world import Case, World, differing, undisturbed
from tensorstow.base.errors import OptionError
from tensorstow.cli.inspect import print_generations
from tensorstow.store.inspect import inspect_store
from tensorstow.store.space import GROWTH_BYTES
from tensorstow.store.store import Store

CASE = Case(commit_every=1, state_format="split")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def used_bytes(world: World) -> int:
    """Return the bytes of the data files that are in use."""
    world.optimizer.synchronize()
    extents = store_of(world)._space.extents
    return sum(extents.sizes) - sum(free.nbytes for free in extents.free)


def store_of(world: World) -> Store:
    store: Store = world.optimizer._states().storage.store  # type: ignore[attr-defined]
    return store


def test_the_disk_holds_two_extents_for_each_chunk_and_one_for_each_snapshot(
    tmp_path: Path,
) -> None:
    world = World(CASE, tmp_path)
    world.train(2)
    chunks = sum(c.file_bytes for c in world.optimizer._states().chunks)
    generation = store_of(world).generation()
    assert generation is not None
    tensors = sum(-(-t.extent.nbytes // 4096) * 4096 for t in generation.tensors)
    header = 4096
    for pinned in range(4):
        most = 2 * chunks + 2 * tensors + pinned * (chunks + tensors) + header
        for _ in range(3):
            world.train(world.step + 1)
            assert used_bytes(world) <= most
        world.optimizer.snapshot(f"kept {pinned}")
    size = sum(f.stat().st_size for f in tmp_path.glob("states-*.bin"))
    for pinned in range(4):
        world.optimizer.drop(f"kept {pinned}")
    world.train(world.step + 2)
    assert used_bytes(world) <= 2 * chunks + 2 * tensors + header
    assert size <= max(GROWTH_BYTES, 6 * chunks + 6 * tensors) + GROWTH_BYTES
    world.close()


def test_files_stop_growing(tmp_path: Path) -> None:
    case = Case(commit_every=1, pin_every=3, steps=60)
    world = World(case, tmp_path)
    ends = []
    for step in range(10, 61, 10):
        world.train(step)
        world.optimizer.synchronize()
        extents = store_of(world)._space.extents
        ends.append(extents.sizes[0] - extents.free[0].trailing(extents.sizes[0]))
    assert ends[-1] <= ends[1]
    world.close()


def test_a_pin_copies_nothing(tmp_path: Path) -> None:
    world = World(CASE, tmp_path)
    world.train(3)
    world.optimizer.synchronize()
    before, written = used_bytes(world), world.optimizer._traffic().bytes_written
    world.optimizer.snapshot("here")
    assert used_bytes(world) == before
    assert world.optimizer._traffic().bytes_written == written
    assert [s.names for s in world.optimizer.snapshots()] == [("here",)]
    world.close()


def test_snapshots_are_there_in_every_process_until_dropped(tmp_path: Path) -> None:
    wanted = undisturbed("split")
    world = World(CASE, tmp_path)
    for step in (2, 5, 7):
        world.train(step)
        world.optimizer.snapshot(f"at {step}")
    world.close()
    world = World(CASE, tmp_path)
    for step in (5, 2, 7):
        assert world.resume(f"at {step}") == step
        assert differing(world.facts(), wanted[step]) == []
    world.optimizer.drop("at 2")
    assert [s.step for s in world.optimizer.snapshots()] == [5, 7]
    with pytest.raises(OptionError, match="'at 2'"):
        world.resume("at 2")
    assert world.resume("at 5") == 5
    world.train(9)
    world.close()
    world = World(CASE, tmp_path)
    assert world.resume() == 9
    assert differing(world.facts(), wanted[9]) == []
    assert world.resume("at 7") == 7
    assert differing(world.facts(), wanted[7]) == []
    world.close()


def test_dropping_what_a_run_goes_on_from(tmp_path: Path) -> None:
    """Its states are still read from there."""
    world = World(CASE, tmp_path)
    world.train(3)
    world.optimizer.snapshot("three")
    world.train(6)
    world.close()
    world = World(CASE, tmp_path)
    assert world.resume("three") == 3
    world.optimizer.drop("three")
    world.train(8)
    assert differing(world.facts(), undisturbed("split")[8]) == []
    world.close()
    world = World(CASE, tmp_path)
    assert world.resume() == 8
    world.close()


def test_names_are_given_once(tmp_path: Path) -> None:
    world = World(CASE, tmp_path)
    world.train(1)
    world.optimizer.snapshot("one")
    with pytest.raises(OptionError, match=r"drop it first|another"):
        world.optimizer.snapshot("one")
    with pytest.raises(OptionError, match="with a letter"):
        world.optimizer.snapshot("7")
    world.close()


@pytest.mark.parametrize("name", ["", " ", "7", "a\nb", "\x1b[31m", "\ud800", b"x", 5, None])
def test_what_is_no_name_is_refused_and_the_run_goes_on(name: Any, tmp_path: Path) -> None:  # noqa: ANN401
    world = World(CASE, tmp_path)
    world.train(1)
    with pytest.raises(OptionError, match="printable"):
        world.optimizer.snapshot(name)
    world.optimizer.snapshot("[/nope]")
    world.train(2)
    assert world.optimizer.commit() == 2
    console = Console(file=io.StringIO(), width=200)
    print_generations(console, inspect_store(tmp_path))
    assert "[/nope]" in console.file.getvalue()  # type: ignore[attr-defined]
