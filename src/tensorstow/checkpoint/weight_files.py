"""Safetensors files that stay open, to read single tensors from where they are."""

import errno as codes
import json
import os
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, Self

import torch

from tensorstow.base.errors import DamageError, TransferError, named
from tensorstow.base.regular_file import check_regular
from tensorstow.io.digest_list import digest_of, listed_digest
from tensorstow.io.engine import open_engine
from tensorstow.io.files import IoFuture, open_file, reads_direct
from tensorstow.io.safetensors import read_table

INDEX_SUFFIX = ".index.json"
"""Ends the name of a file that lists the files of a model that has several."""
ONE = "model.safetensors"
INDEX = ONE + INDEX_SUFFIX


def shard_name(stem: str, suffix: str, number: int, count: int) -> str:
    """Return the name of one of a model's files, the first of which has the number 1."""
    return f"{stem}-{number:05}-of-{count:05}.{suffix}" if count > 1 else f"{stem}.{suffix}"


def index_of(files: Mapping[str, str], total_size: int, **metadata: str) -> bytes:
    """Return the index of a model's files: the name of each tensor's file, and their bytes."""
    index = {"metadata": {"total_size": total_size, **metadata}, "weight_map": files}
    return json.dumps(index, indent=2).encode()


class _Facts(NamedTuple):
    """What another program may change about a file."""

    is_same: bool
    """Whether the path leads to the file, if it is opened again for each read."""
    nbytes: int
    mtime_ns: int
    ctime_ns: int
    has_name: bool


class SeenFile:
    """A file of weights as it was when it was opened.

    [Note: Changed files] Programs set the time of the last write back (``rsync --inplace -t``), and
    no program sets that of the last change (ctime), which renaming, linking or ``chmod`` change
    too. So another ctime means changed contents, with two exceptions: the file still has its listed
    digest; or it has none, and has lost its last name since, for another file took it. That happens
    once. Whether somebody also wrote to it in the same interval, and set the time of that write
    back, only its digest tells.
    """

    def __init__(self, path: Path, fd: int | None = None) -> None:
        """Remember the facts of a file, which is read by ``fd``.

        None: it is opened again for each read, and must be the same file each time. Raises
        DirectoryError if there is no such file, DamageError if the list of its digest is damaged.
        """
        self.path = path
        self._is_reopened = fd is None
        with named("File", path):
            check_regular(path)
            # O_PATH: the descriptor is only for fstat(), and needs no permission to read.
            self._fd = os.open(path, os.O_PATH | os.O_CLOEXEC) if fd is None else fd
        if fd is None:
            weakref.finalize(self, os.close, self._fd)
        self._digest = listed_digest(path, (path, path.with_name(INDEX)))
        self._seen = self._look()

    @classmethod
    def held(cls, path: Path) -> Self:
        """Return the facts of a file that may lose its name, and stays open for that."""
        with named("File", path):
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            seen = cls(path, fd)
        except BaseException:
            os.close(fd)
            raise
        weakref.finalize(seen, os.close, fd)
        return seen

    def validate_unchanged(self) -> None:
        """Raise DamageError if somebody has written to the file since, or replaced it."""
        now = self._look()
        if now == self._seen:
            return
        lost_name = not self._is_reopened and self._seen.has_name and not now.has_name
        only_lost_name = lost_name and now[:3] == self._seen[:3] and self._digest is None
        if not only_lost_name and not self._has_digest():
            message = (
                f"{self.path} was changed while a model is computed with its weights or reads them:"
                " what was read before and after are of different models. Write new weights to a"
                " new file (and rename it, if need be), and stow() a model anew."
            )
            raise DamageError(message)
        self._seen = now

    def _has_digest(self) -> bool:
        """Return whether the contents are those of the list that was written with the file."""
        # Its name may be another file's by now.
        opened = self.path if self._is_reopened else Path(f"/proc/self/fd/{self._fd}")
        return self._digest is not None and digest_of(opened) == self._digest

    def _look(self) -> _Facts:
        try:
            facts = os.fstat(self._fd)
            is_same = not self._is_reopened or os.path.samestat(facts, self.path.stat())
        except OSError as error:
            code = error.errno or codes.EIO
            raise TransferError(self.path, "fstat", offset=0, length=0, errno=code) from error
        times = facts.st_mtime_ns, facts.st_ctime_ns
        return _Facts(is_same, facts.st_size, *times, has_name=facts.st_nlink > 0)


class WeightFile(SeenFile):
    """One file of weights, open for asynchronous reads."""

    def __init__(self, files: "WeightFiles", path: Path, *, has_table: bool = True) -> None:
        """Open ``path``, and remember its facts; ``has_table``: it is a safetensors file.

        Raises DirectoryError if it cannot be opened, OptionError if it is no safetensors.
        """
        self.engine = files.engine
        self._file = open_file(files.engine, path, access=os.O_RDONLY)
        weakref.finalize(self, self._file.close)
        super().__init__(path, self._file.fd)
        self.entries = read_table(path, self._file.fd).entries if has_table else {}

    def read(self, offset: int, into: torch.Tensor) -> IoFuture:
        """Start filling ``into``, bytes in host memory, from byte ``offset``."""
        return self._file.read(into, offset)


class WeightFiles:
    """All files of one model, read through one I/O engine."""

    def __init__(self, tables: Iterable[Path], plain: Iterable[Path] = ()) -> None:
        """Open safetensors files, and ``plain`` ones of other kinds; raises as ``WeightFile``."""
        safetensors = set(tables)
        paths = sorted(safetensors.union(plain))
        # Through the page cache threads are faster.
        backend = None if all(reads_direct(path) for path in paths) else "threads"
        self.engine = open_engine(backend)
        self.by_path = {p: WeightFile(self, p, has_table=p in safetensors) for p in paths}
