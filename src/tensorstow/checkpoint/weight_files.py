"""Safetensors files that stay open, to read single tensors from where they lie."""

import errno as codes
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import torch

from tensorstow.base.errors import DamageError, TransferError
from tensorstow.io.engine import open_engine
from tensorstow.io.files import IoFuture, open_file, reads_direct
from tensorstow.io.safetensors import read_table


class WeightFile:
    """One safetensors file, open for asynchronous reads."""

    def __init__(self, files: "WeightFiles", path: Path) -> None:
        """Open ``path``, and remember its size and the time of its last change.

        Raises DirectoryError where it cannot be opened, OptionError where it is no safetensors.
        """
        self.path = path
        self.engine = files.engine
        self._file = open_file(files.engine, path, access=os.O_RDONLY)
        weakref.finalize(self, self._file.close)
        self._seen = self._look()
        self.entries = read_table(path).entries
        self.validate_unchanged()

    def read(self, offset: int, into: torch.Tensor) -> IoFuture:
        """Start filling ``into``, bytes in host memory, from byte ``offset``."""
        return self._file.read(into, offset)

    def validate_unchanged(self) -> None:
        """Raise DamageError if somebody has written to the file since it was opened."""
        if self._look() != self._seen:
            message = (
                f"{self.path} was changed while a model is computed with its weights: what was read"
                " before and after are of different models. Write new weights to a new file (and"
                " rename it, if need be), and stow() a model anew."
            )
            raise DamageError(message)

    def _look(self) -> tuple[int, int]:
        try:
            facts = os.fstat(self._file.fd)
        except OSError as error:
            code = error.errno or codes.EIO
            raise TransferError(self.path, "fstat", offset=0, length=0, errno=code) from error
        return facts.st_size, facts.st_mtime_ns


class WeightFiles:
    """All files of one model, read through one I/O engine."""

    def __init__(self, paths: Iterable[Path]) -> None:
        """Open every file; raises as ``WeightFile``."""
        paths = sorted(set(paths))
        # Through the page cache threads are faster.
        backend = None if all(reads_direct(path) for path in paths) else "threads"
        self.engine = open_engine(backend)
        self.by_path = {path: WeightFile(self, path) for path in paths}
