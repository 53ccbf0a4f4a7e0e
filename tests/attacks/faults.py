"""The n-th call of the system that names a directory, or a file in it, fails."""

import builtins
import errno as codes
import fcntl
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorstow import _native

OS_CALLS = (
    *("open", "stat", "lstat", "fstat", "statvfs", "mkdir", "unlink", "ftruncate", "replace"),
    *("pread", "preadv", "pwrite", "pwritev", "fsync", "fdatasync", "scandir", "listdir"),
)


class Faults:
    """Counts calls about ``root``, and lets one of them fail."""

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.root = os.fspath(root)
        self.calls: list[str] = []
        self.fail_at, self.code = -1, 0
        self.is_full = False
        """Nothing can be added; what is there can be written over."""
        for name in OS_CALLS:
            patch.setattr(os, name, self._wrap(name, getattr(os, name)))
        for name in ("fcntl", "flock"):
            patch.setattr(fcntl, name, self._wrap(name, getattr(fcntl, name)))
        opened = self._wrap("io.open", io.open)
        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        patch.setattr(_native, "fallocate", self._reserve(_native.fallocate))

    def arm(self, at: int, code: int) -> None:
        """Let call number ``at`` from now on fail with ``code``; -1: none."""
        self.calls, self.fail_at, self.code = [], at, code

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:  # noqa: ANN401
            is_ours = self._is_ours(given[0] if given else None)
            if is_ours and self.is_full and _adds(name, given):
                raise OSError(codes.ENOSPC, os.strerror(codes.ENOSPC))
            if is_ours and self._fails(name):
                where = given[0] if isinstance(given[0], str | os.PathLike) else None
                raise OSError(self.code, os.strerror(self.code), where)
            return real(*given, **named)

        return call

    def _reserve(self, real: Callable[[int, int], int]) -> Callable[[int, int], int]:
        def reserve(fd: int, nbytes: int) -> int:
            if self.is_full and self._is_ours(fd):
                return codes.ENOSPC
            return self.code if self._is_ours(fd) and self._fails("fallocate") else real(fd, nbytes)

        return reserve

    def _fails(self, name: str) -> bool:
        self.calls.append(name)
        return len(self.calls) - 1 == self.fail_at

    def _is_ours(self, where: object) -> bool:
        try:
            path = readlink(f"/proc/self/fd/{where}") if type(where) is int else os.fspath(where)  # type: ignore[arg-type]
        except (OSError, TypeError):
            return False
        return isinstance(path, str) and path.startswith(self.root)


def _adds(name: str, given: tuple[Any, ...]) -> bool:
    if name == "open":  # a file that is there is opened all the same
        return bool(given[1] & (os.O_CREAT | os.O_TMPFILE)) and not Path(given[0]).is_file()
    return name in {"mkdir", "ftruncate"} or (name == "pwritev" and given[2] == 0)


readlink = os.readlink
