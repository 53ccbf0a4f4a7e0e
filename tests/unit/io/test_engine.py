"""Which backend serves, and why not a better one."""

import errno as codes
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorstow import _native
from tensorstow.base.errors import OptionError, TransferError
from tensorstow.io import engine as engine_module
from tensorstow.io.engine import (
    BACKENDS,
    PAGE_BLOCK,
    BackendChoice,
    choose_backend,
    open_engine,
    probe_backend,
)
from tensorstow.io.files import create_file, scratch_file
from tensorstow.report.rss import resident_bytes


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Probe anew in each test, and let nobody's environment choose."""
    monkeypatch.delenv("TENSORSTOW_IO", raising=False)
    engine_module._chosen.clear()
    yield
    engine_module._chosen.clear()


def forbid(monkeypatch: pytest.MonkeyPatch, *names: str, code: int) -> None:
    """Let the system answer ``code`` where one of these backends is started."""
    real = _native.Engine

    def start(backend: str, *options: int) -> _native.Engine:
        if backend in names:
            raise OSError(code, "io_uring_setup")
        return real(backend, *options)

    monkeypatch.setattr(_native, "Engine", start)


def test_threads_always_work(tmp_path: Path) -> None:
    assert probe_backend("threads", tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_the_choice_works_and_reads_well() -> None:
    choice = choose_backend()
    assert probe_backend(choice.name) is None
    assert str(choice).startswith(choice.name)
    assert [name for name, _ in choice.refused] == list(BACKENDS[: BACKENDS.index(choice.name)])


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (codes.ENOSYS, r"no io_uring.*\(ENOSYS\)"),
        (codes.EPERM, r"forbidden.*seccomp.*\(EPERM\)"),
        (codes.EACCES, r"security module \(EACCES\)"),
        (codes.ENOMEM, r"ulimit -l.*\(ENOMEM\)"),
        (codes.EIO, r"Input/output error \(EIO\)"),
    ],
)
def test_a_forbidden_ring_gives_way_and_says_why(
    monkeypatch: pytest.MonkeyPatch, code: int, reason: str
) -> None:
    forbid(monkeypatch, "uring", code=code)
    choice = choose_backend()
    assert choice.name == "threads"
    assert open_engine().backend == "threads"
    assert re.match(f"threads; not uring: .*{reason}", str(choice))


def test_a_named_backend_that_does_not_work_gives_way_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forbid(monkeypatch, "uring", code=codes.EPERM)
    with caplog.at_level(logging.WARNING, "tensorstow"):
        assert open_engine("uring").backend == "threads"
    assert "uring was requested; using threads; not uring: io_uring is forbidden" in caplog.text


def test_a_named_backend_that_works_is_taken_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    assert open_engine("threads").backend == "threads"
    assert caplog.text == ""


def test_the_environment_chooses_where_the_caller_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TENSORSTOW_IO", "threads")
    assert choose_backend() == BackendChoice("threads", ())


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="'aio' was requested; there are uring, threads"):
        choose_backend("aio")


def test_nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    forbid(monkeypatch, *BACKENDS, code=codes.EPERM)
    with pytest.raises(OSError, match=r"none works here.*uring: .*threads: "):
        choose_backend()


def test_a_backend_that_loses_bytes_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "equal", lambda *_: False)
    assert probe_backend("threads") == "it returned other bytes than were written"


def test_a_directory_that_cannot_be_written_is_the_reason() -> None:
    assert "ENOENT" in str(probe_backend("threads", Path("/proc/nowhere")))


@pytest.mark.parametrize(("depth", "block"), [(0, 4096), (-1, 4096), (1, 0), (1, 4095), (1, 100)])
def test_sizes_that_cannot_be(depth: int, block: int) -> None:
    with pytest.raises(OptionError, match=r"requested|was given"):
        open_engine("threads", depth=depth, block_bytes=block)


def test_an_engine_tells_what_it_is() -> None:
    engine = open_engine("threads", depth=3, block_bytes=8192)
    assert (engine.backend, engine.depth, engine.block_bytes) == ("threads", 3, 8192)
    assert set(engine.counters().values()) == {0}


def test_a_number_that_no_file_has_is_refused() -> None:
    engine = open_engine("threads")
    with pytest.raises(ValueError, match="no file has the number 7"):
        engine.read(7, 0, 0, 0, None)


def test_writes_are_logged_in_the_order_in_which_they_land(tmp_path: Path) -> None:
    engine = _native.Engine("threads", 1, PAGE_BLOCK)
    with create_file(engine, tmp_path / "file") as file:
        file.write(torch.zeros(3, dtype=torch.uint8), 0).wait()
        assert engine.logged_writes() == []
        engine.log_writes()
        file.write(torch.arange(5000, dtype=torch.int16).view(torch.uint8), 7).wait()
        file.write(torch.tensor([9], dtype=torch.uint8), 1).wait()
        engine.inject_fault("write", error=codes.EIO)
        with pytest.raises(TransferError):
            file.write(torch.ones(4, dtype=torch.uint8), 2).wait()
        logged = engine.logged_writes()
    assert [(number, offset) for number, offset, _ in logged] == [
        (file.number, at) for at in (7, 4103, 8199, 1)
    ]
    data = torch.arange(5000, dtype=torch.int16).numpy().tobytes()
    assert b"".join(written for _, _, written in logged) == data + b"\x09"
    assert engine.logged_writes() == []


@pytest.mark.usefixtures("garbage_apart")
def test_few_blocks_in_flight_go_through_buffers(tmp_path: Path) -> None:
    if probe_backend("uring") is not None:
        pytest.skip("io_uring does not work here")
    engine, count = open_engine("uring", depth=32), 40 << 20
    memory = torch.ones(count + 4096, dtype=torch.uint8)
    first = 1 - memory.data_ptr() % 2  # at no address that direct I/O takes
    with scratch_file(engine, tmp_path, count) as file:
        if not file.direct:
            pytest.skip("no direct I/O here")
        before = resident_bytes()
        file.write(memory[first : first + count], 0).wait()
        file.read(memory[first : first + count], 0).wait()
        assert engine.counters()["bounced"] == engine.counters()["blocks"] >= 80
        assert resident_bytes() - before < 16 << 20  # eight of a MiB, and not 32


@pytest.mark.parametrize(("depth", "drives", "threads"), [(32, 1, 8), (128, 1, 8), (64, 2, 16)])
def test_each_drive_has_threads_of_its_own(depth: int, drives: int, threads: int) -> None:
    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = count()
    engine = open_engine("threads", depth=depth, drives=drives)
    assert count() - before == threads
    del engine
