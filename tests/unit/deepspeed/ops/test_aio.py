"""Files through upstream's handle."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from tensorstow.base.errors import AbsentAttributeError, DirectoryError, OptionError, TransferError
from tensorstow.deepspeed import ops
from tensorstow.deepspeed.ops import op_builder
from tensorstow.deepspeed.ops.aio import AioHandle
from tensorstow.deepspeed.ops.op_builder import AsyncIOBuilder
from tensorstow.io.files import IoFuture


@pytest.fixture
def handle() -> AioHandle:
    made: AioHandle = (
        AsyncIOBuilder()
        .load()
        .aio_handle(1 << 16, 8, single_submit=False, overlap_events=True, intra_op_parallelism=2)
    )
    return made


def test_it_says_what_it_was_told(handle: AioHandle) -> None:
    assert AsyncIOBuilder().is_compatible()
    assert ops.__compatible_ops__[AsyncIOBuilder.NAME]
    assert (handle.get_block_size(), handle.get_queue_depth()) == (1 << 16, 8)
    assert (handle.get_single_submit(), handle.get_overlap_events()) == (False, True)
    assert (handle.get_intra_op_parallelism(), handle.get_alignment()) == (2, 1)
    assert AioHandle(block_size=1000).get_block_size() == 1000
    with pytest.raises(OptionError, match="queue_depth=0 was given"):
        AioHandle(queue_depth=0)


@pytest.mark.parametrize("count", [1 << 18, 1001])
@pytest.mark.parametrize("offset", [0, 4096, 7])
def test_what_is_written_is_read(
    handle: AioHandle, tmp_path: Path, count: int, offset: int
) -> None:
    file = str(tmp_path / "file")
    values = torch.arange(count)
    assert handle.sync_pwrite(values, file, offset) == 1
    assert Path(file).stat().st_size == offset + values.nbytes
    read = handle.new_cpu_locked_tensor(count, values)
    assert handle.sync_pread(read, file, offset) == 1
    assert torch.equal(read, values)
    other = AioHandle(queue_depth=1)
    assert [other.is_pinned(t) for t in (read, read[1:], values)] == [True, True, False]
    assert [handle.free_cpu_locked_tensor(t) for t in (read, read, values)] == [True, False, False]
    assert not other.is_pinned(read)


def test_several_are_under_way(handle: AioHandle, tmp_path: Path) -> None:
    files = [str(tmp_path / str(number)) for number in range(4)]
    values = [torch.full((5000,), float(number)) for number in range(4)]
    for tensor, file in zip(values, files, strict=True):
        assert handle.async_pwrite(tensor, file) == 0
    assert handle.wait() == 4
    assert handle.wait() == 0
    read = [torch.empty(5000) for _ in files]
    for tensor, file in zip(read, files, strict=True):
        assert handle.pread(tensor, file, validate=False, async_op=True) == 0
    assert handle.wait() == 4
    assert all(torch.equal(*each) for each in zip(read, values, strict=True))
    assert (
        handle.pwrite(values[3][:10], files[0], validate=False, async_op=False, file_offset=40) == 1
    )
    assert handle.pread(read[0], files[0], validate=True, async_op=False) == 1
    assert read[0][8:22].tolist() == [0.0, 0.0, *[3.0] * 10, 0.0, 0.0]


def test_a_transfer_that_fails_is_told(handle: AioHandle, tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"abc")
    good = torch.empty(3, dtype=torch.uint8)
    handle.async_pread(torch.empty(100), str(tmp_path / "short"))
    handle.async_pread(good, str(tmp_path / "short"))
    with pytest.raises(TransferError, match="short"):
        handle.wait()
    assert bytes(good.tolist()) == b"abc"
    assert handle.wait() == 0
    for start in (handle.async_pread, handle.async_pwrite):
        with pytest.raises(DirectoryError):
            start(good, str(tmp_path / "none" / "file"))
    with pytest.raises(OptionError, match="must be contiguous"):
        handle.sync_pwrite(torch.ones(4, 4)[:, 0], str(tmp_path / "x"))


def test_an_interrupted_wait_can_be_made_again(handle: AioHandle, tmp_path: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    values = torch.arange(1000)
    handle.async_pwrite(values, str(tmp_path / "file"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(IoFuture, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            handle.wait()
    assert handle.wait() == 1
    assert (tmp_path / "file").read_bytes() == values.numpy().tobytes()


def test_other_builders_are_refused_by_name() -> None:
    with pytest.raises(AbsentAttributeError, match="FusedLambBuilder is not in"):
        op_builder.FusedLambBuilder  # noqa: B018


def descriptor_of(path: Path, *, direct: bool) -> int:
    flags = os.O_RDWR | os.O_CREAT
    if direct:
        with suppress(OSError):  # a file system in memory has none
            return os.open(path, flags | os.O_DIRECT)
    return os.open(path, flags)


@pytest.mark.parametrize("direct", [False, True])
def test_a_descriptor_may_stand_for_a_name(
    handle: AioHandle, tmp_path: Path, *, direct: bool
) -> None:
    values = torch.arange(4096)
    descriptor = descriptor_of(tmp_path / "file", direct=direct)
    assert handle.async_pwrite(values, fd=descriptor) == 0
    assert handle.async_pwrite(values + 1, descriptor, values.nbytes) == 0
    os.close(descriptor)
    assert handle.wait() == 2
    read = torch.empty(8192, dtype=values.dtype)
    handle.sync_pread(read, str(tmp_path / "file"))
    assert torch.equal(read, torch.cat([values, values + 1]))
    few = torch.full((1024,), 7, dtype=torch.uint8)  # less than a block
    descriptor = descriptor_of(tmp_path / "file", direct=direct)
    assert handle.async_pwrite(few, fd=descriptor, file_offset=1024) == 0
    assert handle.async_pwrite(few[:512], fd=descriptor) == 0
    assert handle.wait() == 2
    os.close(descriptor)
    expected = read.view(torch.uint8).clone()
    expected[1024:2048] = expected[:512] = 7
    assert (tmp_path / "file").read_bytes() == expected.numpy().tobytes()
    for given in ({}, {"filename": "file", "fd": 1}):
        with pytest.raises(OptionError, match="pass exactly one"):
            handle.async_pwrite(values, **given)
