"""Checks whether a directory can hold states: its filesystem, free space and permissions.

RAM that looks like a disk (tmpfs, ramfs, zram) is the trap: it takes direct I/O and every
byte "offloaded" there stays in memory, so it is never chosen and never accepted.
"""

import contextlib
import errno as codes
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tensorstow.base.errors import DirectoryError, advice_for
from tensorstow.base.sizes import format_bytes

logger = logging.getLogger("tensorstow")

_MOUNTINFO = Path("/proc/self/mountinfo")
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
_MEMORY_DEVICES = ("/dev/zram", "/dev/ram")


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """Properties of one directory: its filesystem, free space and permissions."""

    path: Path
    """Absolute, symbolic links resolved."""
    filesystem: str
    """The kind as the kernel names it: ext4, xfs, overlay, tmpfs ..."""
    device: str
    """What is mounted there: /dev/nvme0n1p2, a network share, or a plain word."""
    is_memory_backed: bool
    """Bytes written here stay in RAM."""
    is_writable: bool
    """A file could be created here just now."""
    free_bytes: int
    """What an unprivileged user may still write."""
    refusal: int = 0
    """The errno if no file could be created, else 0."""


class _Mount(NamedTuple):
    point: str
    filesystem: str
    device: str


def inspect_directory(
    path: str | os.PathLike[str], *, mountinfo: Path = _MOUNTINFO
) -> DirectoryFacts:
    """Find out about ``path``, or raise DirectoryError where there is no such directory."""
    resolved = Path(path).expanduser().resolve()
    try:
        is_directory, is_there = resolved.is_dir(), resolved.exists()
        space = os.statvfs(resolved) if is_directory else None
    except OSError as error:
        code = error.errno or codes.EIO
        message = (
            f"Directory {resolved} was requested but cannot be looked at: {os.strerror(code)}."
            f" {advice_for(code)}"
        )
        raise DirectoryError(message) from error
    if space is None:
        found = "is not a directory" if is_there else "does not exist"
        message = f"Directory {resolved} was requested but {found}. Create it or name another."
        raise DirectoryError(message)
    mount = _mount_of(resolved, mountinfo)
    refusal = _try_to_create_file(resolved)
    return DirectoryFacts(
        path=resolved,
        filesystem=mount.filesystem,
        device=mount.device,
        is_memory_backed=_is_memory(mount),
        is_writable=not refusal,
        free_bytes=space.f_bavail * space.f_frsize,
        refusal=refusal,
    )


def check_directory(
    path: str | os.PathLike[str], needed_bytes: int = 0, *, mountinfo: Path = _MOUNTINFO
) -> DirectoryFacts:
    """Return the facts about ``path``; raise DirectoryError if it cannot hold states."""
    facts = inspect_directory(path, mountinfo=mountinfo)
    objection = _objection(facts, needed_bytes)
    if objection is not None:
        message = f"Directory {facts.path} was requested but {objection}. Name another directory."
        raise DirectoryError(message)
    return facts


def make_directories(paths: Iterable[str | os.PathLike[str]]) -> list[DirectoryFacts]:
    """Create missing directories of ``paths`` and return the facts about all of them.

    Raises DirectoryError if one cannot be created or cannot hold states; directories created before
    the error are removed. If a parent was missing too, that is logged: the path may be mistyped, or
    a disk not mounted.
    """
    made: list[Path] = []
    try:
        return [_made(Path(path).expanduser(), made) for path in paths]
    except BaseException:
        for path in reversed(made):
            with contextlib.suppress(OSError):  # it holds a file of another process by now
                path.rmdir()
        raise


def _made(path: Path, made: list[Path]) -> DirectoryFacts:
    missing = []
    try:
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for part in reversed(missing):
            part.mkdir(exist_ok=True)  # ranks and other runs make theirs at the same time
            made.append(part)
    except FileExistsError:
        pass  # a link to nowhere: the check below says so
    except OSError as error:
        message = (
            f"Directory {path} was requested and cannot be made: {error.strerror}."
            f" {advice_for(error.errno or codes.EIO)}"
        )
        raise DirectoryError(message) from error
    facts = check_directory(path)
    if len(missing) > 1:
        logger.warning(
            "Directory %s was made, and %s above it: they are on %s (%s), with %s free",
            path,
            missing[-1],
            facts.filesystem,
            facts.device,
            format_bytes(facts.free_bytes),
        )
    return facts


def choose_directory(
    needed_bytes: int = 0,
    candidates: Iterable[Path] | None = None,
    *,
    mountinfo: Path = _MOUNTINFO,
) -> DirectoryFacts:
    """Return the first candidate that is on a real disk, writable and large enough.

    Without ``candidates``: $TMPDIR, /var/tmp, ~/.cache, and the working directory.
    """
    refused = []
    for candidate in default_candidates() if candidates is None else candidates:
        try:
            return check_directory(candidate, needed_bytes, mountinfo=mountinfo)
        except DirectoryError as error:
            refused.append(f"  {error}")
    asked = (
        f"No directory can hold {format_bytes(needed_bytes)} of states. Name one that is on a"
        " real disk, writable and large enough. These were tried:"
    )
    raise DirectoryError("\n".join([asked, *(refused or ["  none at all"])]))


def default_candidates(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """List where scratch files usually may go, the user's own choice first."""
    chosen = [Path(environ["TMPDIR"])] if environ.get("TMPDIR") else []
    home = [Path(environ["HOME"], ".cache")] if environ.get("HOME") else []
    return [*chosen, Path("/var/tmp"), *home, Path.cwd()]  # noqa: S108  # files are unlinked


def _objection(facts: DirectoryFacts, needed_bytes: int) -> str | None:
    if facts.is_memory_backed:
        return f"is {facts.filesystem} on {facts.device}: what is written there stays in RAM"
    # A full one may hold a run that is to be read; callers that need space pass needed_bytes.
    is_full = facts.refusal in {codes.ENOSPC, codes.EDQUOT} and not needed_bytes
    if not facts.is_writable and not is_full:
        if facts.refusal in {codes.EACCES, codes.EPERM, codes.EROFS}:
            return "no file can be created in it (read-only, or not this user's)"
        why = f"{os.strerror(facts.refusal)}. {advice_for(facts.refusal)}".rstrip(".")
        return f"no file can be created in it: {why}"
    if facts.free_bytes < needed_bytes:
        free, needed = format_bytes(facts.free_bytes), format_bytes(needed_bytes)
        return f"has {free} free where {needed} are needed"
    return None


def _try_to_create_file(path: Path) -> int:
    """Return 0 if a file can be created in ``path``, else the errno."""
    # By trying: root passes every permission check, also on a read-only filesystem.
    # The file never has a name where the filesystem can do that, and loses it at once elsewhere.
    try:
        with tempfile.TemporaryFile(dir=path):
            return 0
    except OSError as error:
        return error.errno or codes.EIO


def _is_memory(mount: _Mount) -> bool:
    return mount.filesystem in _MEMORY_FILESYSTEMS or mount.device.startswith(_MEMORY_DEVICES)


def _mount_of(path: Path, mountinfo: Path) -> _Mount:
    """Return the mount that ``path`` lies on: the longest that is a parent, the latest of equals.

    The kernel's own list is read because statfs has only numbers, which Python does not expose.
    """
    try:
        lines = mountinfo.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        lines = []
    mounts = [mount for line in lines if path.is_relative_to((mount := _parse_mount(line)).point)]
    # max() keeps the first of equals, and a later mount on the same point hides the earlier.
    unknown = _Mount("/", "unknown", "unknown")
    return max(reversed(mounts), key=lambda mount: len(mount.point), default=unknown)


def _parse_mount(line: str) -> _Mount:
    """Read one line: ``36 35 98:0 /root /point options [tags] - filesystem device options``."""
    before, _, after = line.partition(" - ")
    filesystem, device = after.split(" ")[:2]
    return _Mount(_unescape(before.split(" ")[4]), filesystem, _unescape(device))


def _unescape(text: str) -> str:
    r"""Undo the kernel's escapes: a space in a path is written as ``\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
