"""Files: direct, unnamed, and errors that say what to do."""

import ctypes
import errno as codes
import logging
import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import children
from tensorstow import _native
from tensorstow.base.errors import DirectoryError, DTypeError, OptionError, TransferError
from tensorstow.io import files as files_module
from tensorstow.io.engine import open_engine, probe_backend
from tensorstow.io.files import (
    ALIGN,
    File,
    accepts_direct,
    create_file,
    open_file,
    reads_direct,
    scratch_file,
    transfer_error,
    wait_for_all,
)

MIB = 1 << 20
LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(params=["uring", "threads"])
def engine(request: pytest.FixtureRequest) -> _native.Engine:
    """Serve each test on each backend that works here."""
    if probe_backend(request.param) is not None:
        pytest.skip(f"{request.param} does not work here")
    return open_engine(request.param, depth=8)


@pytest.fixture
def buffered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the filesystem refuse O_DIRECT."""
    monkeypatch.setattr(files_module, "_go_direct", lambda *_: False)
    files_module._warned_buffered.clear()
    yield
    files_module._warned_buffered.clear()


def cached_bytes(fd: int) -> int:
    """Return how many bytes of a file are in the page cache."""
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, prot=mmap.PROT_READ | mmap.PROT_WRITE) as view:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(view)
        assert LIBC.mincore(ctypes.byref(start), ctypes.c_size_t(size), pages) == 0
        del start
        return sum(page & 1 for page in pages) * mmap.PAGESIZE


def round_trip(file: File, sent: torch.Tensor, offset: int = 0) -> None:
    file.write(sent, offset).wait()
    back = torch.zeros_like(sent)
    file.read(back, offset).wait()
    assert torch.equal(sent, back)


@pytest.mark.parametrize("count", [0, 1, 3, 511, 1024, 1025, 300_000, 3 * MIB + 7])
def test_any_length_comes_back(engine: _native.Engine, tmp_path: Path, count: int) -> None:
    with scratch_file(engine, tmp_path, 0) as file:
        round_trip(file, torch.randint(0, 255, (count,), dtype=torch.uint8), 2 * ALIGN)


@pytest.mark.parametrize("shift", [0, 1, 5, 64, 4095])
def test_any_address_comes_back(engine: _native.Engine, tmp_path: Path, shift: int) -> None:
    memory = torch.randint(0, 255, (2 * MIB + 5000,), dtype=torch.uint8)
    with scratch_file(engine, tmp_path, 4 * MIB) as file:
        round_trip(file, memory[shift : shift + 2 * MIB + 11])


def test_a_write_touches_no_other_block(engine: _native.Engine, tmp_path: Path) -> None:
    first, second = torch.full((10,), 1, dtype=torch.uint8), torch.full((10,), 2, dtype=torch.uint8)
    with scratch_file(engine, tmp_path, 2 * ALIGN) as file:
        file.write(second, ALIGN).wait()
        file.write(first, 0).wait()
        back = torch.zeros_like(second)
        file.read(back, ALIGN).wait()
        assert torch.equal(back, second)


def test_reads_begin_at_any_byte(engine: _native.Engine, tmp_path: Path) -> None:
    sent = torch.randint(0, 255, (2 * MIB,), dtype=torch.uint8)
    with scratch_file(engine, tmp_path, 2 * MIB) as file:
        file.write(sent, 0).wait()
        for offset in (1, 8, 4095, 4097, 4096 * 77 + 64):
            for count in (0, 1, 4096, MIB + 5):
                back = torch.zeros(count, dtype=torch.uint8)
                file.read(back, offset).wait()
                assert torch.equal(back, sent[offset : offset + count])
        if file.direct:
            with pytest.raises(OptionError, match="written at multiples of 4096"):
                file.write(back, 8)


def test_a_file_to_read_needs_no_right_to_write(engine: _native.Engine, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(range(256)) * 32)
    path.chmod(0o400)
    assert reads_direct(path) == accepts_direct(tmp_path)
    with open_file(engine, path, access=os.O_RDONLY) as file:
        back = torch.zeros(256, dtype=torch.uint8)
        file.read(back, 256).wait()
        assert back.tolist() == list(range(256))
        with pytest.raises(TransferError, match="EBADF"):
            file.write(back, 0).wait()
    with pytest.raises(DirectoryError, match="No such file"):
        reads_direct(tmp_path / "none")


def test_direct_files_stay_out_of_the_page_cache(engine: _native.Engine, tmp_path: Path) -> None:
    if not accepts_direct(tmp_path):
        pytest.skip("this filesystem refuses O_DIRECT")
    with scratch_file(engine, tmp_path, 32 * MIB) as file:
        assert file.direct
        round_trip(file, torch.randint(0, 255, (32 * MIB,), dtype=torch.uint8))
        assert cached_bytes(file.fd) < MIB


@pytest.mark.usefixtures("buffered")
def test_without_direct_io_the_page_cache_is_dropped(
    engine: _native.Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tensorstow"):
        files = [scratch_file(engine, tmp_path, 16 * MIB) for _ in range(2)]
    assert caplog.text.count("refuses O_DIRECT") == 1
    sent = torch.randint(0, 255, (16 * MIB,), dtype=torch.uint8)
    for file in files:
        assert not file.direct
        round_trip(file, sent)
        round_trip(file, sent[:777], 13)  # any offset will do
        assert cached_bytes(file.fd) < MIB
        file.close()


def test_more_than_two_gib_in_one_transfer(engine: _native.Engine, tmp_path: Path) -> None:
    count = (2 << 30) + 4096 + 8
    if shutil.disk_usage(tmp_path).free < 2 * count:
        pytest.skip("too little space")
    with scratch_file(engine, tmp_path, count) as file:
        sent = torch.arange(count // 8, dtype=torch.int64)
        file.write(sent, 0).wait()
        sent.zero_()
        file.read(sent, 0).wait()
        assert sent[-1] == sent.numel() - 1
        assert torch.equal(sent[::1000], torch.arange(0, sent.numel(), 1000))


def test_the_directory_is_empty_and_may_even_go(engine: _native.Engine, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with scratch_file(engine, folder, MIB) as file:
        assert list(folder.iterdir()) == []
        folder.rmdir()
        round_trip(file, torch.rand(1000))


def test_nothing_is_left_of_a_process_that_dies(tmp_path: Path) -> None:
    script = f"""
import os, torch
from pathlib import Path
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
file = scratch_file(open_engine(), Path({str(tmp_path)!r}), 1 << 20)
future = file.write(torch.rand(1 << 18), 0)
os._exit(9)
"""
    done = children.run("-c", script, check=False)
    assert done.returncode == 9
    assert list(tmp_path.iterdir()) == []


def test_without_unnamed_files_the_name_goes_at_once(
    engine: _native.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: int, **more: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(codes.EOPNOTSUPP, "no O_TMPFILE")
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with scratch_file(engine, tmp_path, 4096) as file:
        assert list(tmp_path.iterdir()) == []
        round_trip(file, torch.rand(10))


def test_space_is_reserved_and_can_grow(engine: _native.Engine, tmp_path: Path) -> None:
    with scratch_file(engine, tmp_path, 3 * MIB) as file:
        assert os.fstat(file.fd).st_blocks * 512 >= 3 * MIB
        file.reserve(8 * MIB)
        assert os.fstat(file.fd).st_blocks * 512 >= 8 * MIB
        file.reserve(MIB)  # never less
        assert os.fstat(file.fd).st_size == 8 * MIB


def test_a_filesystem_that_cannot_reserve_gets_a_sparse_file(
    engine: _native.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "fallocate", lambda _fd, _length: codes.EOPNOTSUPP)
    with scratch_file(engine, tmp_path, MIB) as file:
        assert os.fstat(file.fd).st_size == MIB
        round_trip(file, torch.rand(100))


def test_a_full_disk_is_named_with_its_sizes(
    engine: _native.Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DirectoryError, match=r"free where 1024\.0 PiB are needed"):
        scratch_file(engine, tmp_path, 1 << 60)
    monkeypatch.setattr(_native, "fallocate", lambda _fd, _length: codes.ENOSPC)
    with pytest.raises(DirectoryError, match=r"1\.0 MiB of space .* No space left .* free"):
        scratch_file(engine, tmp_path, MIB)


@pytest.mark.parametrize(
    ("directory", "found"),
    [
        ("/nowhere/at/all", "does not exist"),
        ("/dev/shm", "stays in RAM"),
        ("/proc", "no place for files"),
        (__file__, "is not a directory"),
    ],
)
def test_directories_that_cannot_hold_a_file(directory: str, found: str) -> None:
    with pytest.raises(DirectoryError, match=found):
        scratch_file(open_engine("threads"), Path(directory), 4096)


def test_tensors_that_are_not_one_run_of_bytes_are_refused(tmp_path: Path) -> None:
    with scratch_file(open_engine(), tmp_path, MIB) as file:
        with pytest.raises(DTypeError, match="contiguous"):
            file.write(torch.rand(4, 4).t(), 0)
        with pytest.raises(DTypeError, match="only CPU"):
            file.read(torch.rand(4, device="meta"), 0)
        with pytest.raises(DTypeError, match="contiguous"):
            file.read(torch.rand(4, 4).to_sparse(), 0)


def test_offsets_that_a_file_does_not_take(tmp_path: Path) -> None:
    with scratch_file(open_engine(), tmp_path, MIB) as file:
        for offset in (-ALIGN, *((1, 512) if file.direct else ())):
            with pytest.raises(OptionError, match=f"offset {offset}"):
                file.write(torch.rand(4), offset)


def test_closing_waits_and_is_final(engine: _native.Engine, tmp_path: Path) -> None:
    file = scratch_file(engine, tmp_path, MIB)
    engine.inject_fault("write", delay_us=30_000)
    future = file.write(torch.rand(1000), 0)
    file.close()
    assert future.done()
    future.wait()
    file.close()
    with pytest.raises(OptionError, match="after it was closed"):
        file.read(torch.rand(4), 0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_may_only_close(engine: _native.Engine, tmp_path: Path) -> None:
    file = scratch_file(engine, tmp_path, MIB)
    engine.inject_fault("write", delay_us=50_000)
    future = file.write(torch.rand(1000), 0)
    pid = os.fork()
    if pid == 0:
        refused = 0
        for call in (future.done, future.wait, lambda: file.write(torch.rand(4), 0)):
            try:
                call()
            except RuntimeError:
                refused += 1
        file.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    future.wait()
    round_trip(file, torch.rand(1000))
    file.close()


def test_a_created_file_takes_any_offset_and_replaces(
    engine: _native.Engine, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"something longer than what comes")
    with create_file(engine, path) as file:
        file.write(torch.frombuffer(bytearray(b"world"), dtype=torch.uint8), 6).wait()
        file.write(torch.frombuffer(bytearray(b"hello,"), dtype=torch.uint8), 0).wait()
    assert path.read_bytes() == b"hello,world"


def test_a_file_that_cannot_be_created_is_named() -> None:
    with pytest.raises(DirectoryError, match=r"/nowhere/file .* No such file"):
        create_file(open_engine(), Path("/nowhere/file"))


def test_the_end_of_a_file_is_not_an_unreadable_sector() -> None:
    early = transfer_error(Path("f"), "read", -1, 0, 10)
    sector = transfer_error(Path("f"), "read", codes.ENODATA, 0, 10)
    assert isinstance(early, TransferError)
    assert early.errno == 0
    assert "the end of the file" in str(early)
    assert sector.errno == codes.ENODATA
    assert "the end of the file" not in str(sector)


def test_the_tail_of_a_file_that_is_no_multiple_of_the_block(
    engine: _native.Engine, tmp_path: Path
) -> None:
    path = tmp_path / "given"
    path.write_bytes(bytes(range(250)) * 20)
    flags = os.O_DIRECT if accepts_direct(tmp_path) else 0
    fd = os.open(path, os.O_RDWR | flags)
    with File(engine, fd, path, direct=bool(flags)) as file:
        back = torch.zeros(5000, dtype=torch.uint8)
        file.read(back, 0).wait()
        assert bytes(back.numpy()) == bytes(range(250)) * 20


@pytest.mark.parametrize("content", [b"", b"kept" * 1024])
def test_an_opened_file_keeps_what_is_in_it(
    engine: _native.Engine, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "given"
    path.write_bytes(content)
    with open_file(engine, path) as file:
        assert file.direct == accepts_direct(tmp_path)
        assert path.read_bytes() == content
        round_trip(file, torch.rand(5000), ALIGN)
    assert path.read_bytes()[: len(content)] == content


@pytest.mark.usefixtures("buffered")
def test_an_opened_file_without_direct_io_warns_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "given"
    path.touch()
    with caplog.at_level(logging.WARNING, "tensorstow"):
        for _ in range(2):
            open_file(open_engine(), path).close()
    assert caplog.text.count("refuses O_DIRECT") == 1


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=r"absent was requested: No such file"):
        open_file(open_engine(), tmp_path / "absent")


def test_all_transfers_are_waited_for_before_the_first_error_is_raised() -> None:
    over = []

    class Transfer:
        def __init__(self, number: int) -> None:
            self.number = number

        def wait(self) -> None:
            over.append(self.number)
            if self.number:
                raise OSError(codes.EIO, str(self.number))

    with pytest.raises(OSError, match="1"):
        wait_for_all(map(Transfer, range(3)))  # type: ignore[arg-type]
    assert over == [0, 1, 2]
