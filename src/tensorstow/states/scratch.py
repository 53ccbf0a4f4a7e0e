"""Disk space of chunks in scratch files, freed when the process ends."""

import logging
from collections.abc import Sequence
from pathlib import Path

import tensorstow._native as _native
from tensorstow.base.directories import choose_directory
from tensorstow.base.sizes import format_bytes
from tensorstow.io.engine import open_engine
from tensorstow.io.files import File, accepts_direct, scratch_file
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.stored_chunks import FilePosition

logger = logging.getLogger("tensorstow")


class ScratchStorage:
    """Unnamed files in one directory or several; a chunk has one place for ever."""

    durable = False

    def __init__(
        self, directories: Sequence[Path], policy: PipelinePolicy, *, moving: bool
    ) -> None:
        """Remember where; files are made when chunks come. ``moving``: some will."""
        self._directories = tuple(directories)
        self._policy = policy
        self._moving = moving
        self._files: dict[int, File] = {}
        self.engine: _native.Engine | None = None

    def open_engine(self) -> _native.Engine:
        """Return the engine, made for what the files need."""
        if self.engine is None:
            # With all states in RAM nothing is moved: the least of engines will do.
            self.engine = (
                self._start(self._policy.backend)
                if self._moving
                else _native.Engine("threads", 1, 4096)
            )
        return self.engine

    def reserve(self, widths: Sequence[int]) -> list[FilePosition]:
        """Return a place for each of ``widths`` bytes, in files that go round the directories.

        Raises DirectoryError where one is missing, read-only, in RAM or too full.
        """
        if not widths:
            return []
        directories = self._directories or (choose_scratch(sum(widths)),)
        if self.engine is None:
            direct = all(accepts_direct(d) for d in directories)
            self.engine = self._start(self._policy.backend if direct else "threads")
        made: list[File] = []
        try:
            for turn, directory in enumerate(directories):
                share = sum(widths[turn :: len(directories)])
                made.append(scratch_file(self.engine, directory, share))
        except BaseException:
            for file in made:
                file.close()
            raise
        self._files |= {file.number: file for file in made}
        ends = [0] * len(made)
        places = []
        for index, width in enumerate(widths):
            turn = index % len(made)
            places.append((made[turn].number, ends[turn]))
            ends[turn] += width
        return places

    def _start(self, backend: str | None) -> _native.Engine:
        return open_engine(backend, depth=self._policy.depth, node=self._policy.node)

    def file(self, number: int) -> File:
        """Return the file that the engine calls ``number``."""
        return self._files[number]

    def path(self, number: int) -> Path:
        """Return the path of that file, for messages."""
        return self._files[number].path if number in self._files else Path("(no file)")

    @property
    def directories(self) -> tuple[Path, ...]:
        """Where files are."""
        return tuple(dict.fromkeys(file.path.parent for file in self._files.values()))

    def close(self) -> None:
        """Drop the files. Idempotent."""
        for file in self._files.values():
            file.close()
        self._files = {}
        self.engine = None


def choose_scratch(nbytes: int) -> Path:
    """Return a directory on a real disk with room for ``nbytes``, and log which."""
    facts = choose_directory(nbytes)
    logger.warning(
        "%s of optimizer states go to scratch files in %s (%s on %s, %s free); name a directory"
        " to choose another place",
        format_bytes(nbytes),
        facts.path,
        facts.filesystem,
        facts.device,
        format_bytes(facts.free_bytes),
    )
    return facts.path
