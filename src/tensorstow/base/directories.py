"""Checks whether a directory can hold states: its filesystem, free space and permissions.

RAM that looks like a disk (tmpfs, ramfs, zram) is the trap: it takes direct I/O and every
byte "offloaded" there stays in memory, so it is never chosen and never accepted.
"""

import contextlib
import errno as codes
import logging
import os
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tensorstow.base.errors import (
    DirectoryError,
    OptionError,
    StoreFormatError,
    abbreviated,
    advice_for,
    named,
)
from tensorstow.base.mounts import FSTAB, MOUNTINFO, Mount, mount_of, unmounted_point
from tensorstow.base.sizes import format_bytes

logger = logging.getLogger("tensorstow")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
"""As Path() writes a URL too, with one slash."""
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class DirectoryFacts:
    """Properties of one directory: its filesystem, free space and permissions."""

    path: Path
    """Absolute, symbolic links resolved."""
    mount: Mount
    """The filesystem that it is on."""
    free_bytes: int
    """What an unprivileged user may still write."""
    refusal: int = 0
    """The errno if no file could be created, else 0."""

    @property
    def is_writable(self) -> bool:
        """A file could be created here just now."""
        return not self.refusal


def inspect_directory(
    path: str | os.PathLike[str], *, mountinfo: Path = MOUNTINFO
) -> DirectoryFacts:
    """Find out about ``path``, or raise DirectoryError if there is no such directory."""
    resolved = resolve_path(path)
    with named("Directory", resolved):
        is_directory, is_there = resolved.is_dir(), resolved.exists()
        space = os.statvfs(resolved) if is_directory else None
    if space is None:
        _refuse_kernel_files(resolved)
        problem = "is not a directory" if is_there else "does not exist"
        message = f"Directory {resolved} was requested but {problem}. Create it or name another."
        raise DirectoryError(message)
    return DirectoryFacts(
        path=resolved,
        mount=mount_of(resolved, mountinfo),
        free_bytes=space.f_bavail * space.f_frsize,
        refusal=_try_to_create_file(resolved),
    )


def expand_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder for ~; raise DirectoryError if it cannot be a path."""
    try:
        expanded = Path(path).expanduser()
        os.fsencode(expanded)
    except (TypeError, RuntimeError, UnicodeEncodeError) as error:
        raise _no_path(path, error) from error
    if path == "" or "\0" in str(expanded):
        raise _no_path(path, "it has a zero byte" if path else 'it is empty ("." is this one)')
    _refuse_url(path)
    return expanded


def _refuse_url(path: str | os.PathLike[str]) -> None:
    if _URL.match(str(path)):
        raise _no_path(path, "it is a URL, and only files of this machine are read and written")


def read_paths(value: Paths | None, keyword: str) -> tuple[Path, ...]:
    """Return one path or several as a tuple; empty for None.

    Raises:
        OptionError: It is an empty list, or an empty text, or neither a path nor a list.
        DirectoryError: One cannot be a path.
    """
    if value is None:
        return ()
    several: object = [value] if isinstance(value, str | os.PathLike) else value
    if not isinstance(several, Sequence) or isinstance(several, bytes):
        shown = abbreviated(value)
        message = f"{keyword}={shown} was given: name a directory, or a list of directories."
        raise OptionError(message)
    if not several:
        message = f"{keyword}= is an empty list: name at least one directory, or leave it out."
        raise OptionError(message)
    if any(isinstance(path, str) and not path for path in several):
        message = f'{keyword}="" was given: name a directory ("." for this one), or leave it out.'
        raise OptionError(message)
    paths = tuple(expand_path(path) for path in several)
    if len({resolve_path(path) for path in paths}) < len(paths):
        message = f"{keyword}={[str(path) for path in paths]} was given: name each directory once."
        raise OptionError(message)
    return paths


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, which may be missing, without ~ and symbolic links.

    Raises:
        DirectoryError: It is nothing that a path can be, or its links are a loop.
    """
    try:
        return expand_path(path).resolve()
    except (OSError, RuntimeError) as error:
        # ``expand_path`` raises it, with its own message.
        if isinstance(error, DirectoryError):
            raise
        raise _no_path(path, error) from error


def _no_path(path: object, why: object) -> DirectoryError:
    shown = abbreviated(str(path) if isinstance(path, Path) else path)
    message = f"{shown} was given as a path: {why}. Name another one."
    return DirectoryError(message)


def check_directory(
    path: str | os.PathLike[str], needed_bytes: int = 0, *, mountinfo: Path = MOUNTINFO
) -> DirectoryFacts:
    """Return the facts about ``path``; raise DirectoryError if it cannot hold states."""
    facts = inspect_directory(path, mountinfo=mountinfo)
    objection = _objection(facts, needed_bytes)
    if objection is not None:
        _refuse(facts.path, objection)
    return facts


def _refuse(path: Path, objection: str) -> NoReturn:
    message = f"Directory {path} was requested but {objection}. Name another directory."
    raise DirectoryError(message)


def make_directories(paths: Iterable[str | os.PathLike[str]]) -> list[DirectoryFacts]:
    """Create missing directories of ``paths`` and return the facts about all of them.

    Raises DirectoryError if one cannot be created or cannot hold states, or if the directory that
    it should be in is missing: the path may be mistyped, or a disk not mounted. Directories created
    before the error are removed.
    """
    created: list[Path] = []
    try:
        return [_made(expand_path(path), created) for path in paths]
    except BaseException:
        for path in reversed(created):
            with contextlib.suppress(OSError):  # it holds a file of another process by now
                path.rmdir()
        raise


def _made(path: Path, created: list[Path]) -> DirectoryFacts:
    _refuse_kernel_files(path)
    _refuse_unmounted(path)
    # Other ranks and runs make theirs at the same time; or it is a link to nowhere.
    with named("Directory", path), contextlib.suppress(FileExistsError):
        if not path.exists():
            _refuse_missing(path, path if _is_below_root(path) else path.parent)
            path.mkdir()
            created.append(path)
    return check_directory(path)


def _is_below_root(path: Path) -> bool:
    """Return whether a path is a directory of the root, which is a mount point more often."""
    return path.is_absolute() and path.parent == Path(path.anchor)


def _refuse_unmounted(path: Path) -> None:
    """Raise DirectoryError for a path on a disk that is to be mounted there, and is not."""
    point = unmounted_point(resolve_path(path))
    if point is not None:
        message = (
            f"Directory {path} was requested, and nothing is mounted on {point}, a mount point of"
            f" {FSTAB}: files would be on the disk that {point} is on. Mount it, or name another"
            " directory."
        )
        raise DirectoryError(message)


def _refuse_missing(path: Path, parent: Path) -> None:
    """Raise DirectoryError if ``parent`` of a path is missing: a slip, or a disk not mounted."""
    missing = next((p for p in reversed((parent, *parent.parents)) if not p.exists()), None)
    if missing is not None:
        message = (
            f"Directory {path} was requested, and {missing} does not exist. If the path is"
            f" right and its disk mounted, make it: mkdir -p {shlex.quote(str(path))}"
        )
        raise DirectoryError(message)


def make_folder(path: Path) -> None:
    """Make a directory for files that a user asked for, and the one that it is in.

    Of a relative path all levels are made. An absolute one may be misspelled or lack its mount: all
    but the last two levels must exist, and the first one.

    Raises:
        DirectoryError: It cannot be made, levels are missing, or no file can be in it.
    """
    _refuse_url(path)
    with named("Directory", path):
        _refuse_kernel_files(path)
        _refuse_unmounted(path)
        if path.is_absolute():
            first = Path(*path.parts[:2])
            _refuse_missing(path, max(first, path.parent.parent, key=lambda p: len(p.parts)))
        path.mkdir(parents=True, exist_ok=True)


def choose_directory(
    needed_bytes: int = 0,
    candidates: Iterable[Path] | None = None,
    *,
    mountinfo: Path = MOUNTINFO,
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


def path_inside(directory: Path, name: object, source: Path, *, links: bool = False) -> Path:
    """Return the path of a file of a checkpoint that another file names.

    Args:
        directory: The directory of the checkpoint.
        name: The name, as it was read.
        source: The file that it was read from.
        links: Whether it may be a symbolic link to a file elsewhere. In a directory of Hugging
            Face's cache it may always be one to the cache's files.

    Raises:
        StoreFormatError: The name leads out of the directory.
    """
    if isinstance(name, str) and name and "\0" not in name:
        path, root = directory / name, Path(os.path.realpath(directory))
        # Hugging Face's cache has links from snapshots/REVISION to files in blobs, next to it.
        if root.parent.name == "snapshots":
            root = root.parent.parent
        is_plain = not Path(name).is_absolute() and ".." not in Path(name).parts
        is_inside = links or Path(os.path.realpath(path)).is_relative_to(root)
        if is_plain and path != directory and is_inside:
            return path
    message = (
        f"{source} names {name!r}, which is no file in {directory}: something else wrote it, or"
        " files were moved or linked. Take the original."
    )
    raise StoreFormatError(message)


def default_candidates(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """List where scratch files usually may go, the user's own choice first."""
    chosen = [Path(environ["TMPDIR"])] if environ.get("TMPDIR") else []
    home = [Path(environ["HOME"], ".cache")] if environ.get("HOME") else []
    return [*chosen, Path("/var/tmp"), *home, Path.cwd()]  # noqa: S108  # files are unlinked


def _refuse_kernel_files(path: Path) -> None:
    """Raise DirectoryError for a path in /proc and its like: making a cgroup would succeed."""
    mount = mount_of(resolve_path(path))
    if mount.is_of_kernel:
        _refuse(path, _no_place(mount.filesystem))


def _no_place(filesystem: str) -> str:
    return f"is in {filesystem}, which shows the kernel's own values: it is no place for files"


def _objection(facts: DirectoryFacts, needed_bytes: int) -> str | None:
    if str(facts.path).encode("utf-8", "replace").decode() != str(facts.path):
        return "has a name that is not UTF-8, in which names of files are kept"
    mount = facts.mount
    if mount.is_of_kernel or mount.is_memory:
        in_ram = f"is {mount.filesystem} on {mount.device}: what is written there stays in RAM"
        return _no_place(mount.filesystem) if mount.is_of_kernel else in_ram
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
