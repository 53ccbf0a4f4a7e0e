"""Raw I/O from an arena against fio: the same pattern, on the same file."""

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu.raw import RawFile, Transfer, alternate, cut
from benchmarks.measure import (
    Contender,
    Figure,
    Settings,
    at_least,
    interleave,
    not_available,
    ratio,
)
from tensorstow import _native
from tensorstow.io.engine import BACKENDS, probe_backend

_BLOCK = 1 << 20
_TRANSFER = 2 * _BLOCK  # what the pipeline submits; the engine cuts it
_FILE_BYTES = 1 << 30
_DEPTHS = (8, 32)
_LIMIT = at_least(0.95)
_FIO_ENGINES = ("io_uring", "libaio")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One way to go over the file, for us and for fio."""

    name: str
    fio_rw: str
    transfers: Sequence[Transfer]


def figures(settings: Settings) -> Iterator[Figure]:
    """Read, write, and read one half while the other is written; at two depths."""
    nbytes = 16 * _BLOCK if settings.quick else _FILE_BYTES
    directory = settings.scratch(nbytes)
    backends = [name for name in BACKENDS if probe_backend(name, directory) is None]
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".tensorstow-bench-") as file:
        path = Path(file.name)
        try:
            fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            yield not_available("raw I/O / fio", _LIMIT, f"no O_DIRECT here: {error.strerror}")
            return
        try:
            yield from _on_file(path, fd, nbytes, backends, settings)
        finally:
            os.close(fd)


def patterns(nbytes: int) -> list[Pattern]:
    """Return the patterns over a file of ``nbytes``."""
    half = nbytes // 2
    mixed = alternate(cut("read", 0, half, _TRANSFER), cut("write", half, nbytes, _TRANSFER))
    return [
        Pattern("read", "read", cut("read", 0, nbytes, _TRANSFER)),
        Pattern("write", "write", cut("write", 0, nbytes, _TRANSFER)),
        Pattern("mixed", "rw", mixed),
    ]


def _on_file(
    path: Path, fd: int, nbytes: int, backends: list[str], settings: Settings
) -> Iterator[Figure]:
    os.posix_fallocate(fd, 0, nbytes)
    for depth in _DEPTHS:
        engines = {name: _native.Engine(name, depth, _BLOCK) for name in backends}
        raw = {name: RawFile(engine, fd, 2 * depth * _BLOCK) for name, engine in engines.items()}
        # Reads of extents that were never written come from nowhere.
        next(iter(raw.values())).run(cut("write", 0, nbytes, _TRANSFER))
        fio, why = _fio(path, depth, nbytes)
        for pattern in patterns(nbytes):
            pause = 0.0 if fio is None else fio.idle_seconds
            contenders = {name: _ours(file, pattern, pause) for name, file in raw.items()}
            if fio is not None:
                contenders["fio"] = fio.contender(pattern)
            samples = interleave(contenders, settings.pairs)
            for name in raw:
                title = f"raw I/O, {pattern.name}, 1 MiB x {depth}, {name}: speed / fio"
                if fio is None:
                    yield not_available(title, _LIMIT, why)
                    continue
                figure = ratio(title, _LIMIT, samples, "fio", name)
                speeds = {key: nbytes / s.median / 1e9 for key, s in samples.items()}
                figure.detail["gb_per_second"] = speeds
                yield figure


def _ours(file: RawFile, pattern: Pattern, pause: float) -> Contender:
    def run() -> float:
        # fio's process starts while the disk is idle, in which time a disk empties its caches (or
        # a cloud's rate limiter fills its bucket): the same for us.
        time.sleep(pause)
        return file.run(pattern.transfers)

    return run


@dataclass(frozen=True, slots=True)
class _Fio:
    """A command line that works here."""

    options: Sequence[str]
    idle_seconds: float
    """From the start of its process to its first transfer, about."""

    def contender(self, pattern: Pattern) -> Contender:
        def run() -> float:
            seconds = _run_fio([*self.options, f"--rw={pattern.fio_rw}"])
            if seconds is None:
                message = f"fio failed at {pattern.name}, after it worked"
                raise RuntimeError(message)
            return seconds

        return run


def _fio(path: Path, depth: int, nbytes: int) -> tuple[_Fio | None, str]:
    """Return fio as it runs here, or None and why it does not."""
    command = shutil.which("fio")
    if command is None:
        return None, "fio is not installed"
    for engine in _FIO_ENGINES:
        options = [
            command,
            "--name=bench",
            f"--filename={path}",
            f"--ioengine={engine}",
            f"--iodepth={depth}",
            f"--bs={_BLOCK}",
            f"--size={nbytes}",
            "--direct=1",
            "--output-format=json",
        ]
        start = time.perf_counter()
        seconds = _run_fio([*options, "--rw=read"])
        if seconds is not None:
            return _Fio(options, max(0.0, time.perf_counter() - start - seconds)), ""
    return None, f"fio runs with none of {', '.join(_FIO_ENGINES)} here"


def _run_fio(command: list[str]) -> float | None:
    """Return the seconds of fio's own clock, start and end of the process left out."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    if job["error"]:
        return None
    milliseconds: int = max(job["read"]["runtime"], job["write"]["runtime"], 1)
    return milliseconds / 1e3
