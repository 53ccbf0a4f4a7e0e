"""What a training on a device cannot be faster than: compute, the link, host memory, the disk.

Each is measured alone, with nothing beside it: a step that hides everything behind the slowest of
them takes as long as that one.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from benchmarks.accelerator.place import Place
from benchmarks.accelerator.ways import Moved, Way
from benchmarks.cpu import arrays
from benchmarks.cpu.raw import RawFile, alternate, cut
from benchmarks.measure import Contender, Sample
from tensorstow.io.device_link import DeviceLink, open_link
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.io.pinned import PinnedBlock

COMPUTE, DOWN, UP, DRAM, DISK = "compute", "link down", "link up", "host DRAM", "disk"
_PIECES = 16
_TRANSFER = 1 << 20


@dataclass(frozen=True, slots=True)
class Rate:
    """Work that is done alone, and how many bytes it moves."""

    nbytes: int
    run: Contender


@dataclass(frozen=True, slots=True)
class Bound:
    """What a way's step is bound by."""

    seconds: Mapping[str, float]
    """Of each thing alone, for the bytes and sums of one step."""

    @property
    def name(self) -> str:
        """Return which is slowest."""
        return max(self.seconds, key=lambda name: self.seconds[name])

    @property
    def most(self) -> float:
        """Return the seconds that a step takes at least."""
        return self.seconds[self.name]


def bound_of(
    way: Way, moved: Moved, elements: int, compute: float, rates: Mapping[str, float]
) -> Bound:
    """Return what bounds a step that moves ``moved``; ``rates`` in bytes a second, by name."""
    seconds = {
        COMPUTE: compute,
        DOWN: moved.down / rates[DOWN],
        UP: moved.up / rates[UP],
        DRAM: way.dram_bytes * elements / rates[DRAM],
        DISK: (moved.read + moved.written) / rates[DISK],
    }
    return Bound(seconds)


class Rates:
    """The link, host memory and the disk, each alone."""

    def __init__(self, place: Place, directory: Path, nbytes: int) -> None:
        """Make buffers: ``nbytes`` on the device, in pinned memory, and on disk."""
        self._held = ExitStack()
        link = open_link(place.device)
        self._block = PinnedBlock(
            2 * nbytes, place.device, link.synchronize
        )  # pinned while it lives
        self.each = {**_link(link, self._block), DRAM: _dram(nbytes)}
        self.each[DISK] = self._disk(directory, nbytes)

    def __enter__(self) -> Self:
        """Return this."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let go of memory and file."""
        self.each.clear()
        self._held.close()

    def _disk(self, directory: Path, nbytes: int) -> Rate:
        engine = open_engine(None, depth=32)
        file = self._held.enter_context(scratch_file(engine, directory, nbytes))
        raw = RawFile(engine, file.fd, min(nbytes, 64 << 20))
        reads, writes = (cut(kind, 0, nbytes, _TRANSFER) for kind in ("read", "write"))
        raw.run(writes)  # reads of extents that were never written come from nowhere
        both = alternate(reads, writes)
        return Rate(2 * nbytes, lambda: raw.run(both))


def rates_of(samples: Mapping[str, Sample], each: Mapping[str, Rate]) -> dict[str, float]:
    """Return bytes a second of each."""
    return {name: rate.nbytes / samples[name].median for name, rate in each.items()}


def _link(link: DeviceLink, block: PinnedBlock) -> dict[str, Rate]:
    """Return pinned copies down, up, and both ways at once, of half of ``block`` each."""
    nbytes = block.nbytes // 2
    away = torch.ones(2, nbytes, dtype=torch.uint8, device=link.device)
    made = [link.record_event()]
    piece = nbytes // _PIECES
    here = [block.tensor(i * nbytes, nbytes, torch.uint8) for i in range(2)]
    pieces = [slice(i * piece, (i + 1) * piece) for i in range(_PIECES)]

    def down() -> None:
        for at in pieces:
            link.d2h([(here[0][at], away[0][at])], made)
        link.synchronize()

    def up() -> None:
        for at in pieces:
            link.h2d([(away[1][at], here[1][at])], made)
        link.synchronize()

    def both() -> None:
        for at in pieces:
            link.d2h([(here[0][at], away[0][at])], made)
            link.h2d([(away[1][at], here[1][at])], made)
        link.synchronize()

    moved = piece * _PIECES
    return {
        DOWN: Rate(moved, down),
        UP: Rate(moved, up),
        "link, both ways": Rate(2 * moved, both),
    }


def _dram(nbytes: int) -> Rate:
    """Return our update of as many bytes, on all cores."""
    tensors = arrays.mixed_in_arena(max(1 << 10, nbytes // 28))
    return Rate(tensors.nbytes_moved, arrays.ours(tensors))
