"""AsyncFileWriter: the bytes that were given, in order, or an error."""

import ctypes
import errno as codes
import gc
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstow.base.errors import (
    DirectoryError,
    DTypeError,
    OptionError,
    PoisonedError,
    TransferError,
)
from tensorstow.tensornvme import AsyncFileWriter
from tensorstow.tensornvme.async_file_io import AsyncFileWriter as FromItsModule


@pytest.fixture(params=[None, "uring", "aio", "pthread"])
def backend(request: pytest.FixtureRequest) -> str | None:
    """Name each of TensorNVMe's backends, or none."""
    name: str | None = request.param
    return name


def inject(writer: AsyncFileWriter, **fault: int) -> None:
    writer._file.engine.inject_fault("write", **fault)


def test_it_is_found_where_tensornvme_keeps_it() -> None:
    assert FromItsModule is AsyncFileWriter


def test_everything_goes_behind_what_came_before(tmp_path: Path, backend: str | None) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000_000)  # TensorNVMe would leave the tail of this
    tensor = torch.arange(300_001, dtype=torch.int64)
    raw = (ctypes.c_char * 5)(*b"12345")
    writer = AsyncFileWriter(str(path), n_entries=4, backend=backend, n_tasks=4)
    assert writer.write(b"head") == 4
    writer.write_tensor(tensor)
    writer.write_raw(raw, ctypes.addressof(raw), 5, writer.offset)
    writer.write(b"")
    writer.write(memoryview(b"tail"))
    assert writer.offset == 4 + tensor.nbytes + 9
    writer.synchronize()
    wanted = b"head" + tensor.numpy().tobytes() + b"12345tail"
    assert path.read_bytes() == wanted
    writer.close()
    assert path.read_bytes() == wanted


@settings(deadline=None, max_examples=30)
@given(pieces=st.lists(st.binary(max_size=9000) | st.integers(0, 400_000), max_size=12))
def test_any_pieces(tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes | int]) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces"
    wanted = b""
    with AsyncFileWriter(path, n_entries=2) as writer:
        for piece in pieces:
            data = piece if isinstance(piece, bytes) else os.urandom(1) * piece
            writer.write(data)
            wanted += data
    assert path.read_bytes() == wanted


def test_torch_can_save_into_it(tmp_path: Path) -> None:
    # torch hands out memoryviews of memory that it frees at once.
    state = {"a": torch.arange(1_000_000), "b": torch.rand(3, 3), "c": [1, "two"]}
    with AsyncFileWriter(tmp_path / "state.pt") as writer:
        torch.save(state, writer)
        writer.flush()
    back = torch.load(tmp_path / "state.pt")
    assert torch.equal(back["a"], state["a"])
    assert torch.equal(back["b"], state["b"])
    assert back["c"] == state["c"]


def test_what_can_be_changed_is_copied(tmp_path: Path) -> None:
    data = bytearray(b"before" * 1000)
    with AsyncFileWriter(tmp_path / "file") as writer:
        inject(writer, delay_us=20_000)
        writer.write(data)
        data[:] = b"after!" * 1000
    assert (tmp_path / "file").read_bytes() == b"before" * 1000


def test_data_lives_until_it_is_written(tmp_path: Path) -> None:
    with AsyncFileWriter(tmp_path / "file", n_entries=1) as writer:
        inject(writer, times=5, delay_us=5_000)
        for i in range(50):
            writer.write(bytes([i]) * 10_000)
            writer.write_tensor(torch.full((10_000,), i, dtype=torch.uint8))
        gc.collect()
    wanted = b"".join(bytes([i]) * 20_000 for i in range(50))
    assert (tmp_path / "file").read_bytes() == wanted


def test_finished_pieces_are_let_go(tmp_path: Path) -> None:
    with AsyncFileWriter(tmp_path / "file") as writer:
        for _ in range(20):
            writer.write(b"x" * 1000)
            writer._file.engine.drain()
        assert len(writer._pieces) == 1


def test_tensors_in_row_major_order_whatever_their_strides(tmp_path: Path) -> None:
    matrix = torch.arange(12.0).reshape(3, 4)
    with AsyncFileWriter(tmp_path / "file") as writer:
        writer.write_tensor(matrix.t())
        writer.write_tensor(matrix[:, 1:3])
        writer.write_tensor(torch.rand(3, requires_grad=True)[:0])
    wanted = (
        matrix.t().contiguous().numpy().tobytes() + matrix[:, 1:3].contiguous().numpy().tobytes()
    )
    assert (tmp_path / "file").read_bytes() == wanted


def test_a_step_may_follow_sync_before_step(tmp_path: Path) -> None:
    weights = [torch.full((100_000,), float(i)) for i in range(4)]
    pinned = [torch.empty(100_000) for _ in weights]
    wanted = b"".join(w.numpy().tobytes() for w in weights) * 2
    writer = AsyncFileWriter(tmp_path / "file")
    inject(writer, times=3, delay_us=10_000)
    writer.register_h2d(8)
    for weight in weights:
        writer.write_tensor(weight)
    for weight, buffer in zip(weights, pinned, strict=True):
        writer.write_tensor(weight, buffer)
    writer.sync_before_step()
    for weight in weights:
        weight.add_(1000)
    writer.synchronize()
    writer.close()
    assert (tmp_path / "file").read_bytes() == wanted


def test_copies_are_not_waited_for_before_the_step(tmp_path: Path) -> None:
    with AsyncFileWriter(tmp_path / "file", backend="pthread") as writer:
        inject(writer, delay_us=300_000)
        writer.write_tensor(torch.rand(100), torch.empty(100))
        writer.sync_before_step()
        assert len(writer._pieces) == 1


def test_promised_tensors_that_did_not_come_are_an_error(tmp_path: Path) -> None:
    with AsyncFileWriter(tmp_path / "file") as writer:
        writer.register_h2d(2)
        writer.write_tensor(torch.rand(3))
        with pytest.raises(OptionError, match="1 of the tensors"):
            writer.sync_before_step()
        writer.write_tensor(torch.rand(3))
        writer.sync_before_step()


def test_write_raw_goes_where_it_is_told(tmp_path: Path) -> None:
    raw = (ctypes.c_char * 4)(*b"abcd")
    with AsyncFileWriter(tmp_path / "file") as writer:
        writer.write_raw(raw, ctypes.addressof(raw), 4, 6)
        assert writer.offset == 10
        writer.write_raw(raw, ctypes.addressof(raw), 4, 0)
        assert writer.offset == 10
        writer.write(b"!")
    assert (tmp_path / "file").read_bytes() == b"abcd\0\0abcd!"


def test_a_failure_is_told_and_poisons(tmp_path: Path) -> None:
    writer = AsyncFileWriter(tmp_path / "file")
    inject(writer, error=codes.ENOSPC)
    writer.write(b"data")
    with pytest.raises(TransferError, match="ENOSPC"):
        writer.synchronize()
    with pytest.raises(PoisonedError, match="an earlier one failed"):
        writer.write(b"more")
    writer.close()  # told already


def test_a_failure_is_told_at_close_or_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = AsyncFileWriter(tmp_path / "file")
    inject(writer, times=2, error=codes.EIO)
    writer.write(b"data")
    with pytest.raises(TransferError, match="EIO"):
        writer.close()
    writer.close()
    dropped = AsyncFileWriter(tmp_path / "file")
    inject(dropped, error=codes.EIO)
    dropped.write(b"data")
    del dropped
    gc.collect()
    assert "dropped after a failure" in caplog.text


def test_close_makes_the_file_and_its_name_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink())
    )
    with AsyncFileWriter(tmp_path / "file") as writer:
        writer.write(b"x")
    assert synced == [tmp_path / "file", tmp_path]

    def fail(_fd: int) -> None:
        raise OSError(codes.EIO, "lost")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(TransferError, match="fsync"), AsyncFileWriter(tmp_path / "file") as writer:
        writer.write(b"x")


def test_a_dropped_writer_finishes(tmp_path: Path) -> None:
    writer = AsyncFileWriter(tmp_path / "file")
    inject(writer, delay_us=10_000)
    writer.write(b"x" * 5000)
    del writer
    gc.collect()
    assert (tmp_path / "file").read_bytes() == b"x" * 5000


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_it_alone(tmp_path: Path) -> None:
    writer = AsyncFileWriter(tmp_path / "file")
    inject(writer, delay_us=30_000)
    writer.write(b"x" * 5000)
    pid = os.fork()
    if pid == 0:
        writer.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    writer.close()
    assert (tmp_path / "file").read_bytes() == b"x" * 5000


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="No such file"):
        AsyncFileWriter(tmp_path / "none" / "file")
    with pytest.raises(OptionError, match="n_tasks=-1"):
        AsyncFileWriter(tmp_path / "file", n_tasks=-1)
    with pytest.raises(OptionError, match="backend='x'"):
        AsyncFileWriter(tmp_path / "file", backend="x")
    assert not (tmp_path / "file").exists()
    with AsyncFileWriter(tmp_path / "file") as writer:
        writer.register_tasks(3)
        with pytest.raises(DTypeError, match="pinned has 2 elements"):
            writer.write_tensor(torch.rand(3), torch.rand(2))
        with pytest.raises(OptionError, match="0 or more"):
            writer.write_raw(None, 0, -1, 0)
    with pytest.raises(OptionError, match="after the file was closed"):
        writer.write(b"x")
