"""A disk that fails under a commit: the last one is whole, and no later one pretends to be."""

import errno
import itertools
import os
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from crash.world import Case, World, differing, undisturbed
from parity.cover import crossed
from tensorstow import AdamW, _native
from tensorstow.base.errors import (
    CommitError,
    DamageError,
    OptionError,
    PoisonedError,
    StowError,
    SyncError,
    TransferError,
)
from tensorstow.base.update_on import Overlap
from tensorstow.io.files import File
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.store.durability import SystemDisk
from tensorstow.store.records import ChunkShape, StreamShape, TensorRecord
from tensorstow.store.store import Store

CASE = Case(commit_every=2, state_format="split")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(name="world")
def make_world(tmp_path: Path) -> Iterator[World]:
    world = World(CASE, tmp_path)
    world.train(4)
    world.optimizer.synchronize()
    yield world
    world.close()


def engine_of(world: World) -> _native.Engine:
    engine = world.optimizer._states().engine
    assert engine is not None
    return engine


def assert_whole(directory: Path, step: int = 4, case: Case = CASE) -> None:
    """Resume at ``step`` and go on as if nothing had been."""
    world = World(case, directory)
    assert world.resume() == step
    wanted = undisturbed("split")
    assert differing(world.facts(), wanted[step]) == []
    world.train(step + 5)
    assert differing(world.facts(), wanted[step + 5]) == []
    world.close()


def assert_poisoned(world: World) -> None:
    for use in (world.optimizer.step, world.optimizer.commit, world.optimizer.state_dict):
        # Or what failed beside the caller, told once more.
        with pytest.raises((PoisonedError, SyncError, TransferError)):
            use()


@crossed(
    overlap=("none", "forward", "backward", "speculative"),
    code=(errno.ENOSPC, errno.EIO),
    after=(0, 9, 20),
)
def test_a_write_of_states_fails(overlap: Overlap, code: int, after: int, tmp_path: Path) -> None:
    case = replace(CASE, overlap=overlap)
    world = World(case, tmp_path)
    world.train(5)
    world.optimizer.synchronize()
    with pytest.MonkeyPatch.context() as patch:
        # Of states alone: what else is in a commit is another test's.
        patch.setattr(Store, "write_tensor", _write_nothing)
        engine_of(world).inject_fault("write", after=after, error=code)
        with pytest.raises((TransferError, PoisonedError), match=os.strerror(code)):
            world.train(8)
    assert_poisoned(world)
    world.optimizer.close()
    assert_whole(tmp_path, case=case)


def test_closing_does_not_raise_what_a_call_raised_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit under way fails by what the caller has seen, after the caller has seen it."""
    case = replace(CASE, overlap="forward")
    world = World(case, tmp_path)
    world.train(5)
    world.optimizer.synchronize()
    seen, wait_written = threading.Event(), UpdatePipeline.wait_written

    def wait_until_seen(pipeline: UpdatePipeline) -> None:
        assert seen.wait(60)
        wait_written(pipeline)

    monkeypatch.setattr(UpdatePipeline, "wait_written", wait_until_seen)
    world.train(6)
    failure = (errno.EIO, "write", 0, 0, 0, 4096)
    with pytest.raises(TransferError, match=os.strerror(errno.EIO)):
        world.optimizer._states().pipeline.handle.check(failure)
    seen.set()
    world.optimizer.close()
    monkeypatch.undo()
    assert_whole(tmp_path, case=case)


def _write_nothing(store: Store, kind: str, name: str, tensor: torch.Tensor) -> TensorRecord:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorRecord(kind, name, dtype, tuple(tensor.shape), store.allocate(tensor.nbytes), 0)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward", "speculative"])
@pytest.mark.parametrize("failing", [1, 2, 4])
def test_a_write_of_something_else_fails(
    overlap: Overlap, failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was taken, its commit was not made; the next one is."""
    case = replace(CASE, overlap=overlap)
    world = World(case, tmp_path)
    world.train(5)
    world.optimizer.synchronize()
    held = _held(world)
    write, left = Store.write_tensor, itertools.count(1)
    failed = TransferError("states-0.bin", "write", offset=0, length=8, errno=errno.EIO)

    def fail(store: Store, kind: str, name: str, tensor: torch.Tensor) -> TensorRecord:
        if next(left) == failing:
            raise failed
        return write(store, kind, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "write_tensor", fail)
        with pytest.raises(TransferError):
            world.train(6)
    world.step += 1
    world.scheduler.step()
    world.train(9)
    assert differing(world.facts(), undisturbed("split")[9]) == []
    world.optimizer.synchronize()
    assert _held(world) == held
    world.close()
    assert_whole(tmp_path, step=8, case=case)


def _held(world: World) -> int:
    """Return how many extents the optimizer holds."""
    space = world.optimizer._states().storage
    return sum(space.store._space.extents._held.values())  # type: ignore[attr-defined]


def test_the_sync_of_files_fails(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: SystemDisk, file: File) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(file.path))

    with monkeypatch.context() as patch:
        patch.setattr(SystemDisk, "sync_file", fail)
        with pytest.raises(SyncError, match=r"fdatasync of .* failed"):
            world.train(7)
    assert_poisoned(world)  # also when the disk says that all is well again
    world.close()
    assert_whole(tmp_path)


@pytest.mark.parametrize(
    ("failure", "kind"),
    [("database or disk is full", CommitError), ("disk I/O error", SyncError)],
)
def test_the_transaction_fails(
    failure: str,
    kind: type[StowError],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(_: SystemDisk, __: sqlite3.Connection) -> None:
        error = sqlite3.OperationalError(failure)
        code = sqlite3.SQLITE_FULL if "full" in failure else sqlite3.SQLITE_IOERR
        error.sqlite_errorcode = code
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(SystemDisk, "end_transaction", fail)
        with pytest.raises(kind, match=failure):
            world.optimizer.commit()
    assert_poisoned(world)
    world.close()
    assert_whole(tmp_path)


def test_what_the_caller_keeps_cannot_be_kept(world: World, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"extra\['model'\] is a Model"):
        world.optimizer.commit({"model": world.model})
    world.train(6)  # nothing had been done yet
    world.close()
    assert_whole(tmp_path, step=6)


def test_what_the_callers_function_returns_cannot_be_kept(tmp_path: Path) -> None:
    world = World(CASE, tmp_path)
    world.train(3)
    world.optimizer._runtime.commits.extra_now = lambda: {"model": world.model}
    with pytest.raises(TypeError, match=r"extra\['model'\]"):
        world.train(4)
    world.close()
    assert_whole(tmp_path, step=2)


@pytest.mark.parametrize("what", ["states", "weights", "tensor"])
def test_a_flipped_bit_is_found(what: str, tmp_path: Path) -> None:
    world = World(CASE, tmp_path)
    world.train(4)
    world.optimizer.snapshot("four")
    world.train(8)
    world.optimizer.synchronize()
    space = world.optimizer._states().storage
    newest = space.store.generation()  # type: ignore[attr-defined]
    record = newest.chunks[2]
    shape = newest.layout["chunks"][record.chunk]
    widths = [-(-shape["elements"] // s["per"]) * s["bytes"] for s in shape["streams"]]
    weights_at = sum(-(-w // 4096) * 4096 for w in widths)
    at = {
        "states": record.extent.offset + 5,
        "weights": record.extent.offset + weights_at + 3,
        "tensor": next(t for t in newest.tensors if t.kind == "module").extent.offset,
    }[what]
    world.close()
    with (tmp_path / "states-0.bin").open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 16]))
    world = World(CASE, tmp_path)
    if what == "states":
        world.resume()
        with pytest.raises(DamageError):
            world.train(12)
    else:
        with pytest.raises(DamageError):
            world.resume()
    # Half resumed is not resumed at all.
    for use in (world.optimizer.step, world.optimizer.commit):
        with pytest.raises((PoisonedError, OptionError)):
            use()
    if what != "states":
        assert world.resume("four") == 4  # from which it goes on
        assert differing(world.facts(), undisturbed("split")[4]) == []
        world.train(9)
        assert differing(world.facts(), undisturbed("split")[9]) == []
    world.close()


@pytest.mark.parametrize("named", [True, False])
def test_a_damaged_weight_is_told_by_parameter_and_place(named: bool, tmp_path: Path) -> None:  # noqa: FBT001
    block, sizes = _native.UPDATE_BLOCK, (5_000, 30_000, 10_000)

    def make() -> AdamW:
        net = torch.nn.ParameterDict({n: torch.ones(k) for n, k in zip("abc", sizes, strict=True)})
        module = {"module": net} if named else {}
        return AdamW(net.parameters(), states="disk", dir=tmp_path, **module)  # type: ignore[arg-type]

    optimizer = make()
    optimizer.commit()
    space = optimizer._states().storage
    (record,) = space.store.generation().chunks  # type: ignore[attr-defined]
    (chunk,) = optimizer._states().chunks
    whole, fp32 = chunk.plan.elements, StreamShape(4, 1)  # the chunk's end is padded
    shape = ChunkShape(whole, block, (fp32, fp32), fp32)
    at = record.extent.offset + shape.weight_offset
    optimizer.close()
    with (tmp_path / "states-0.bin").open("r+b") as file:
        file.seek(at + 4 * 40_000)  # of c, in the last block, which b begins
        file.write(b"?")
    optimizer = make()
    start = 2 * block
    names = "b, c" if named else "parameter 1, parameter 2"
    with pytest.raises(DamageError) as caught:
        optimizer.resume()
    told = (
        f"read of {4 * (whole - start)} bytes at offset {at + 4 * start} of"
        f" {tmp_path / 'states-0.bin'}, the weights of {names} (chunk 0, block 2), gave other"
    )
    assert str(caught.value).startswith(told)
    assert "scrub" in str(caught.value)
    optimizer.close()


@pytest.mark.parametrize("tried", [True, False], ids=["tried again", "resumed at once"])
@pytest.mark.parametrize("overlap", ["none", "forward", "backward", "speculative"])
def test_the_first_error_is_the_damage_itself_and_resume_goes_on(
    overlap: Overlap, tmp_path: Path, *, tried: bool
) -> None:
    # Commits at every step: the thread that commits may be the first to see what has failed.
    case = replace(CASE, commit_every=1, overlap=overlap)
    world = World(case, tmp_path)
    world.train(4)
    world.optimizer.snapshot("four")
    world.train(8)
    world.optimizer.synchronize()
    newest = world.optimizer._states().storage.store.generation()  # type: ignore[attr-defined]
    world.close()
    with (tmp_path / "states-0.bin").open("r+b") as file:
        for record in newest.chunks:
            file.seek(record.extent.offset + 5)
            byte = file.read(1)[0]
            file.seek(record.extent.offset + 5)
            file.write(bytes([byte ^ 16]))
    world = World(case, tmp_path)
    assert world.resume() == 8
    with pytest.raises(DamageError) as caught:
        world.train(12)
    uses = (world.optimizer.step, world.optimizer.commit, world.optimizer.synchronize)
    for use in uses if tried else ():
        with pytest.raises(PoisonedError, match=r"by resume\(\)") as again:
            use()
        assert again.value.__cause__ is caught.value
    assert world.resume("four") == 4
    assert differing(world.facts(), undisturbed("split")[4]) == []
    world.train(9)
    assert differing(world.facts(), undisturbed("split")[9]) == []
    world.close()
