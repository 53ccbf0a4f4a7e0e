"""Raw transfers between memory of ours and a file: what a pipeline's time is measured by."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tensorstow import _native
from tensorstow.io.arena import Arena


@dataclass(frozen=True, slots=True)
class Transfer:
    """One read or write to submit."""

    operation: str
    offset: int
    length: int


def cut(operation: str, start: int, stop: int, length: int) -> list[Transfer]:
    """Cut bytes [start, stop) into transfers of ``length``, in order."""
    return [Transfer(operation, at, min(length, stop - at)) for at in range(start, stop, length)]


def alternate(reads: Sequence[Transfer], writes: Sequence[Transfer]) -> list[Transfer]:
    """Return a read, a write, a read ...; both are equally many."""
    return [each for pair in zip(reads, writes, strict=True) for each in pair]


class RawFile:
    """A file of an engine, and buffers that its transfers use in turn."""

    def __init__(self, engine: _native.Engine, fd: int, buffer_bytes: int) -> None:
        """Use the O_DIRECT descriptor ``fd``; it stays the caller's."""
        self._engine = engine
        self._number = engine.add_file(fd, 4096, drop_cache=False)
        self._arena = Arena(buffer_bytes, in_children=False)
        self._arena.tensor(0, self._arena.nbytes, torch.uint8).fill_(1)

    def run(self, transfers: Sequence[Transfer]) -> float:
        """Move everything; return the seconds. Raises OSError where a transfer failed."""
        tickets = []
        at = 0
        start = time.perf_counter()
        for t in transfers:
            # What is read and written is not looked at, so a buffer may be reused in flight.
            at = at if at + t.length <= self._arena.nbytes else 0
            submit = self._engine.read if t.operation == "read" else self._engine.write
            tickets.append(
                submit(self._number, self._arena.address + at, t.length, t.offset, self._arena)
            )
            at += t.length
        self._engine.drain()
        seconds = time.perf_counter() - start
        for ticket in tickets:
            code, offset, length = ticket.error()
            if code:
                raise OSError(code, f"transfer of {length} bytes at offset {offset}")
        return seconds
