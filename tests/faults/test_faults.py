"""Every error that a disk can give, put in at the I/O interface, on both backends."""

import errno as codes
import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compare import all_equal
from tensorstow import _native
from tensorstow.base.errors import TransferError
from tensorstow.io.engine import open_engine, probe_backend
from tensorstow.io.files import ALIGN, File, scratch_file

BLOCK = 4 * ALIGN
COUNT = 16 * BLOCK


@pytest.fixture(params=["uring", "threads"])
def engine(request: pytest.FixtureRequest) -> _native.Engine:
    if probe_backend(request.param) is not None:
        pytest.skip(f"{request.param} does not work here")
    return open_engine(request.param, depth=4, block_bytes=BLOCK)


@pytest.fixture
def file(engine: _native.Engine, tmp_path: Path) -> Iterator[File]:
    with scratch_file(engine, tmp_path, COUNT) as opened:
        yield opened


def some_bytes(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 255, (COUNT,), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("code", [codes.EIO, codes.ENOSPC, codes.EACCES, codes.ENODATA])
def test_an_error_names_its_place_and_what_to_do(file: File, operation: str, code: int) -> None:
    sent = some_bytes()
    file.write(sent, 0).wait()
    file.engine.inject_fault(operation, after=2, error=code)
    start = file.read if operation == "read" else file.write
    future = start(sent.clone(), 0)
    with pytest.raises(TransferError) as caught:
        future.wait()
    error = caught.value
    assert (error.errno, error.operation, error.length) == (code, operation, BLOCK)
    assert error.path == str(file.path)
    assert error.offset % BLOCK == 0
    assert f"offset {error.offset}" in str(error)
    assert error.advice
    assert isinstance(error, OSError)
    with pytest.raises(TransferError):  # it is not forgotten
        future.wait()
    back = torch.zeros_like(sent)
    file.read(back, 0).wait()  # and the engine goes on
    assert torch.equal(back, sent)


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("times", [1, 7, -1])
def test_a_short_transfer_is_finished(file: File, operation: str, times: int) -> None:
    sent, back = some_bytes(), torch.zeros(COUNT, dtype=torch.uint8)
    file.engine.inject_fault(operation, times=times, max_bytes=ALIGN)
    file.write(sent, 0).wait()
    file.read(back, 0).wait()
    assert torch.equal(back, sent)
    resubmitted = file.engine.counters()["resubmitted"]
    if times < 0:  # four attempts for each block of four pages
        assert resubmitted == 3 * COUNT // BLOCK
    else:  # one more for each short one; at the last page of a block the cap is no cap
        assert times - times // 4 <= resubmitted <= times


@pytest.mark.parametrize("code", [codes.EINTR, codes.EAGAIN])
def test_an_interruption_is_tried_again_but_not_for_ever(file: File, code: int) -> None:
    sent = some_bytes()
    file.engine.inject_fault("write", times=5, error=code)
    file.write(sent, 0).wait()
    assert file.engine.counters()["resubmitted"] == 5
    file.engine.inject_fault("read", times=-1, error=code)
    with pytest.raises(TransferError) as caught:
        file.read(sent, 0).wait()
    assert caught.value.errno == code


def test_a_write_that_moves_nothing_is_an_error(file: File) -> None:
    if not file.direct:
        pytest.skip("needs direct I/O: less than a block is nothing there")
    file.engine.inject_fault("write", times=-1, max_bytes=512)
    with pytest.raises(TransferError) as caught:
        file.write(some_bytes(), 0).wait()
    # EINVAL where the disk's own blocks are larger than 512 bytes.
    assert caught.value.errno in {codes.EIO, codes.EINVAL}


def test_the_end_of_the_file_is_said_to_be_that(file: File) -> None:
    with pytest.raises(TransferError, match=r"met the end of the file\. The file ended early") as e:
        file.read(some_bytes(), COUNT - BLOCK).wait()
    assert (e.value.errno, e.value.offset) == (0, COUNT)


def test_the_first_of_many_failures_is_told(file: File) -> None:
    file.engine.inject_fault("write", times=-1, error=codes.EIO)
    futures = [file.write(some_bytes(i), 0) for i in range(8)]
    for future in futures:
        with pytest.raises(TransferError):
            future.wait()
    file.engine.clear_faults()
    file.write(some_bytes(), 0).wait()


def test_a_delay_is_waited_for(file: File) -> None:
    file.engine.inject_fault("write", delay_us=60_000)
    started = time.monotonic()
    future = file.write(some_bytes(), 0)
    assert not future.done()
    with pytest.raises(TimeoutError, match="not over after"):
        future.wait(0.005)
    future.wait(10)
    assert future.done()
    assert time.monotonic() - started >= 0.06


def test_a_future_that_is_dropped_waits_for_its_memory(file: File) -> None:
    sent = some_bytes()
    file.engine.inject_fault("write", times=4, delay_us=10_000)
    for _ in range(10):
        file.write(sent.clone(), 0)  # the copy lives as long as the transfer
    gc.collect()
    back = torch.zeros_like(sent)
    file.read(back, 0).wait()
    assert torch.equal(back, sent)


def test_counters_count_bytes_blocks_and_bounces(file: File) -> None:
    memory = torch.zeros(COUNT + 2 * ALIGN, dtype=torch.uint8)
    aligned = memory[-memory.data_ptr() % ALIGN :][:COUNT]
    file.write(aligned, 0).wait()
    file.read(aligned[: BLOCK + 1], 0).wait()
    found = file.engine.counters()
    assert found["bytes_written"] == COUNT
    assert found["blocks"] == COUNT // BLOCK + 2
    assert found["resubmitted"] == 0
    if file.direct:
        assert found["bounced"] == 1  # the one byte
        assert found["bytes_read"] == BLOCK + ALIGN
    else:
        assert (found["bounced"], found["bytes_read"]) == (0, BLOCK + 1)


def test_the_middle_of_a_read_that_begins_anywhere_needs_no_copy(file: File) -> None:
    if not file.direct:
        pytest.skip("the page cache copies all of it")
    sent = some_bytes()
    file.write(sent, 0).wait()
    memory = torch.zeros(COUNT + 2 * ALIGN, dtype=torch.uint8)
    begin, length = 100, COUNT - 300
    back = memory[-memory.data_ptr() % ALIGN + begin :][:length]
    before = file.engine.counters()["blocks"], file.engine.counters()["bounced"]
    file.read(back, begin).wait()
    assert torch.equal(back, sent[begin : begin + length])
    found = file.engine.counters()
    assert found["bounced"] - before[1] == 2
    # The two ends are of a unit each: the first block is cut into it and the rest, and the last.
    assert found["blocks"] - before[0] == COUNT // BLOCK + 2


def test_many_in_flight_keep_apart(file: File) -> None:
    pieces = [some_bytes(seed)[:ALIGN] for seed in range(COUNT // ALIGN)]
    file.engine.inject_fault("write", after=3, times=9, delay_us=500)
    file.engine.inject_fault("read", after=1, times=5, error=codes.EINTR)
    writes = [file.write(piece, i * ALIGN) for i, piece in enumerate(pieces)]
    for write in writes:
        write.wait()
    backs = [torch.zeros_like(piece) for piece in pieces]
    reads = [file.read(back, i * ALIGN) for i, back in enumerate(backs)]
    for read in reversed(reads):
        read.wait()
    assert all_equal(pieces, backs)
