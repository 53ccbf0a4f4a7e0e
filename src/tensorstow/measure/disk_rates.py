"""Rates of a directory's disk, through the I/O engine that runs use."""

import os
import time
from collections import deque
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Literal

import torch

from tensorstow.base.directories import check_directory
from tensorstow.base.errors import DirectoryError
from tensorstow.base.profile import DirectoryRates
from tensorstow.base.sizes import format_bytes
from tensorstow.io.arena import Arena
from tensorstow.io.engine import BLOCK_BYTES, DEPTH, open_engine
from tensorstow.io.files import File, IoFuture, scratch_file

_FILE_BYTES = 2 << 30
_LEAST_FILE_BYTES = 64 << 20
_PART_OF_FREE = 4
"""A scratch file takes at most one part in so many of the free bytes."""
_TRANSFER = 4 << 20
_UNDER_WAY = 16
"""Transfers in flight: twice the bytes of 32 blocks of a MiB."""
_SETTINGS = tuple((block, depth) for block in (256 << 10, 1 << 20, 4 << 20) for depth in (8, 32))
_DEFAULT = (BLOCK_BYTES, DEPTH)
_AS_GOOD = 0.95
"""The engine's default setting stays if it has at least this share of the best rate."""
_WARMING = 0.25
"""Share of a measurement at its start that does not count: a drive's cache absorbs writes then."""

Pattern = Literal["read", "write", "mixed"]


def measure_directory(directory: Path, seconds: float = 4.0) -> DirectoryRates:
    """Return the rates of reads and writes of a directory's disk.

    It writes to a file without a name, of at most 2 GiB and a quarter of the free bytes: nothing is
    left when the process ends, even if it is killed.

    Raises:
        DirectoryError: It is missing, read-only, in RAM or too full.
        TransferError: The disk failed.
    """
    free = check_directory(directory, _LEAST_FILE_BYTES).free_bytes
    room = min(_FILE_BYTES, free // _PART_OF_FREE) // _TRANSFER
    if room * _TRANSFER < _LEAST_FILE_BYTES:
        message = (
            f"{directory} has {format_bytes(free)} free. A measurement takes a quarter of that, and"
            f" needs {format_bytes(_LEAST_FILE_BYTES)}: free space, or name another directory."
        )
        raise DirectoryError(message)
    turn = seconds / 10
    with scratch_file(open_engine(depth=DEPTH), directory, room * _TRANSFER) as file:
        scratch = _Scratch(file, room)
        scratch.rate("write", _DEFAULT, 1.5 * turn)
        tried = {s: scratch.rate("mixed", s, turn / 2) for s in _SETTINGS}
        best = max(tried, key=lambda setting: tried[setting])
        block, depth = _DEFAULT if tried[_DEFAULT] >= _AS_GOOD * tried[best] else best
        write = scratch.rate("write", (block, depth), 2 * turn)
        read = scratch.rate("read", (block, depth), 1.5 * turn)
        mixed = scratch.rate("mixed", (block, depth), 2 * turn)
    return DirectoryRates(read, write, mixed, block, depth)


class _Scratch:
    """A scratch file of ``room`` transfers; reads stay within the part that was written."""

    def __init__(self, file: File, room: int) -> None:
        self._file = file
        self._room = room
        self._written = 0
        """Transfers written from the start of the file; reads past them would not reach a disk."""
        buffers = Arena(_UNDER_WAY * _TRANSFER, in_children=False)
        self._buffers = buffers.tensor(0, buffers.nbytes, torch.uint8).random_()  # drives compress

    def rate(self, pattern: Pattern, setting: tuple[int, int], seconds: float) -> float:
        """Return bytes per second with requests of a size, and a number of them in flight."""
        block_bytes, depth = setting
        engine = open_engine(depth=depth, block_bytes=block_bytes)
        direct = self._file.direct
        with File(engine, os.dup(self._file.fd), self._file.path, direct=direct) as file:
            return self._run(file, pattern, seconds)

    def _run(self, file: File, pattern: Pattern, seconds: float) -> float:
        under_way: deque[IoFuture] = deque()
        buffers = self._buffers.view(_UNDER_WAY, _TRANSFER)
        started = time.perf_counter()
        counted_from, done, counted = started, 0, 0
        for turn, (operation, at) in enumerate(self._places(pattern)):
            if len(under_way) == _UNDER_WAY:
                under_way.popleft().wait()
                done += 1
            now = time.perf_counter()
            if now - started < _WARMING * seconds:
                counted_from, counted = now, done
            elif now - started >= seconds and done > counted:  # a slow disk gets more time
                break
            start = file.read if operation == "read" else file.write
            under_way.append(start(buffers[turn % _UNDER_WAY], at * _TRANSFER))
            if operation == "write":
                self._written = max(self._written, at + 1)
        elapsed = now - counted_from
        for future in under_way:
            future.wait()
        return (done - counted) * _TRANSFER / elapsed

    def _places(self, pattern: Pattern) -> Iterator[tuple[str, int]]:
        """Yield operations and their offsets, in transfers, without end."""
        if pattern == "write":
            yield from (("write", n % self._room) for n in count())
        elif pattern == "read":
            yield from (("read", n % self._written) for n in count())
        half = self._written // 2  # one half is read, the other one written
        for n in count():
            yield "read", n % half
            yield "write", half + n % half
