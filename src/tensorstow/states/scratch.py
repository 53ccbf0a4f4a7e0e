"""Scratch files of optimizer states: their directories, and the positions of chunks in them."""

import logging
import math
from collections.abc import Sequence
from pathlib import Path

import tensorstow._native as _native
from tensorstow.base.directories import choose_directory
from tensorstow.base.profile import drive_shares
from tensorstow.base.sizes import format_bytes, round_up
from tensorstow.io.files import ALIGN, GROWTH_BYTES, File
from tensorstow.io.scratch import FileTurns, ScratchFiles
from tensorstow.states.policy import PipelinePolicy, engine_for
from tensorstow.states.stored_chunks import FilePosition

logger = logging.getLogger("tensorstow")


class ScratchStorage:
    """Disk space for chunks in scratch files; a chunk keeps the positions that it got.

    Chunks that come later get scratch files of their own.
    """

    durable = False

    def __init__(
        self, directories: Sequence[Path], policy: PipelinePolicy, *, moving: bool
    ) -> None:
        """Keep the directories; files are created with the first chunks, if any are ``moving``."""
        self._directories = tuple(directories)
        self._policy = policy
        self._moving = moving
        self._scratch: list[ScratchFiles] = []
        self._files: dict[int, File] = {}
        self.engine: _native.Engine | None = None

    def open_engine(self) -> _native.Engine:
        """Return the engine, created with the alignment that the files need."""
        if self.engine is None:
            # With all states in RAM nothing is moved: the least of engines will do.
            self.engine = (
                engine_for(self._directories, self._policy)
                if self._moving
                else _native.Engine("threads", 1, 4096)
            )
        return self.engine

    def reserve(self, widths: Sequence[int]) -> list[FilePosition]:
        """Return a place for each of ``widths`` bytes, in a file of each directory.

        Raises DirectoryError where one is missing, read-only, in RAM or too full.
        """
        if not widths:
            return []
        directories = self._directories or (choose_scratch("optimizer states", sum(widths)),)
        if self.engine is None:
            self.engine = engine_for(directories, self._policy)
        shares, sizes = drive_shares(directories), [0] * len(directories)
        # The turns that `ScratchFiles` will take: each file gets just the bytes that it needs.
        turns = FileTurns(shares)
        for padded in (round_up(width, ALIGN) for width in widths):
            sizes[turns.next(padded)] += padded
        engines = [self.engine] * len(directories)  # the native pipeline has one
        scratch = ScratchFiles(engines, directories, sizes, shares)
        self._scratch.append(scratch)
        self._files |= {file.number: file for file in scratch.files}
        extents = [scratch.allocate(width) for width in widths]
        return [(scratch.files[extent.file].number, extent.offset) for extent in extents]

    def file(self, number: int) -> File:
        """Return the file that the engine calls ``number``."""
        return self._files[number]

    def path(self, number: int) -> Path:
        """Return the path of that file, for messages."""
        return self._files[number].path if number in self._files else Path("(no file)")

    @property
    def directories(self) -> tuple[Path, ...]:
        """The directories of the files."""
        return tuple(dict.fromkeys(file.path.parent for file in self._files.values()))

    def close(self) -> None:
        """Drop the files. Idempotent."""
        for scratch in self._scratch:
            scratch.close()
        self._scratch, self._files = [], {}
        self.engine = None


def open_scratch(
    directories: Sequence[Path], expected: int, policy: PipelinePolicy
) -> ScratchFiles:
    """Return scratch files with an I/O engine for each, and ``expected`` bytes reserved.

    Without ``directories`` one is chosen and logged. Raises DirectoryError if one is missing,
    read-only, in RAM or too full.
    """
    chosen = tuple(directories) or (choose_scratch("optimizer states", expected),)
    shares = drive_shares(chosen)
    sizes = [round_up(math.ceil(expected * share), GROWTH_BYTES) for share in shares]
    engines = [engine_for([directory], policy) for directory in chosen]
    return ScratchFiles(engines, chosen, sizes, shares)


def choose_scratch(what: str, nbytes: int = 0) -> Path:
    """Return a directory on a real disk with room for ``nbytes``, and log which."""
    facts = choose_directory(nbytes)
    logger.warning(
        "%s go to scratch files in %s (%s on %s, %s free); name a directory to choose another"
        " place",
        f"{format_bytes(nbytes)} of {what}" if nbytes else what,
        facts.path,
        facts.mount.filesystem,
        facts.mount.device,
        format_bytes(facts.free_bytes),
    )
    return facts.path
