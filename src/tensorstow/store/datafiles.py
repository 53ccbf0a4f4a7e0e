"""The data files: one per directory, with a label that names the run it belongs to."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tensorstow.base.errors import DamageError, StoreFormatError
from tensorstow.base.regular_file import is_there, regular_stream
from tensorstow.store.durability import SystemDisk
from tensorstow.store.heads import find_head, first_pages, parse_head
from tensorstow.store.records import HEADER_BYTES, PAGE

PATTERN = "states-*.bin"
_HEADER = re.compile(rb"tensorstow states 1\nrun ([!-~]+)\nfile (\d+) of (\d+)\n\0*")


@dataclass(frozen=True, slots=True)
class Label:
    """The first page of a data file."""

    run: str
    """The same in all files of a store and in its manifest, in no other's."""
    index: int
    count: int

    def page(self) -> bytes:
        """Return it as the page."""
        text = f"tensorstow states 1\nrun {self.run}\nfile {self.index} of {self.count}\n"
        return text.encode("ascii").ljust(PAGE, b"\0")


def data_path(directory: Path, index: int) -> Path:
    """Return the path of file ``index``, which lies in ``directory``."""
    return directory / f"states-{index}.bin"


def data_paths(directories: Iterable[Path]) -> list[Path]:
    """Return the paths of the files in ``directories``, which are in the run's order."""
    return [data_path(directory, index) for index, directory in enumerate(directories)]


def read_label(path: Path) -> Label | None:
    """Read a data file's label; None if it has none: damaged, or never ours.

    Raises DirectoryError for a pipe, a device, a directory or a symbolic link.
    """
    with regular_stream(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
        match = _HEADER.fullmatch(file.read(PAGE))
    return Label(match[1].decode("ascii"), int(match[2]), int(match[3])) if match else None


def labelled(run: str, directories: Sequence[Path]) -> dict[Label, Path]:
    """Return the paths of the files of a run by the labels that they should have."""
    count = len(directories)
    return {Label(run, k, count): path for k, path in enumerate(data_paths(directories))}


def is_file_of(label: Label, path: Path) -> bool:
    """Return whether ``path`` is the data file that ``label`` names.

    Raises DirectoryError for a pipe, a device, a directory or a symbolic link.
    """
    try:
        return read_label(path) == label
    except (FileNotFoundError, NotADirectoryError):
        return False


def check_unused(directories: Sequence[Path]) -> None:
    """Raise StoreFormatError if one of ``directories`` has states of some run."""
    for directory in directories:
        for path in directory.glob(PATTERN):
            _check_is_nothing(path, directories[0])


def create_files(disk: SystemDisk, run: str, directories: Sequence[Path]) -> None:
    """Make the data files of a new store; nothing is durable yet."""
    for label, path in labelled(run, directories).items():
        disk.create(path, label.page() + first_pages(run))


def check_files(run: str, directories: Sequence[Path]) -> None:
    """Raise unless each of ``directories`` has its file of ``run``.

    StoreFormatError if it is missing or another's, DamageError if its label is unreadable.
    """
    for wanted, path in labelled(run, directories).items():
        label = read_label(path) if is_there(path) else None
        if label == wanted:
            continue
        if label is None and is_there(path):
            message = (
                f"{path} was requested as file {wanted.index} of {wanted.count} of run {run}, and"
                f" its header, {PAGE} bytes at offset 0, is damaged: it names no run. Look at"
                " `dmesg` and the drive's health; put the file back from a copy of the directories,"
                " or go on from a checkpoint elsewhere in another directory."
            )
            raise DamageError(message)
        message = (
            f"{path} was requested as file {wanted.index} of {wanted.count} of run {run};"
            f" {_describe(path, label)}. Name the directories of one run, in the order in which"
            " they were named when it began (`tensorstow run inspect` prints it)."
        )
        raise StoreFormatError(message)


def _check_is_nothing(path: Path, first: Path) -> None:
    # A store that was being made when its process died leaves first pages, perhaps torn, and no
    # manifest.
    label = read_label(path)
    with regular_stream(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
        first_bytes = file.read(HEADER_BYTES + 1)
    pages = [first_bytes[k : k + PAGE].ljust(PAGE, b"\0") for k in range(0, len(first_bytes), PAGE)]
    if len(first_bytes) <= HEADER_BYTES and all(map(_says_nothing, pages)):
        return
    head = None if label is None else find_head(path, label.run)
    if path == data_path(first, 0) and head is not None and head.generation:
        message = (
            f"{path} knows {head} and there is no manifest next to it, or an empty one: what was"
            f" committed is lost with it, unless it is put back from a copy. `tensorstow run"
            f" recover {first}` looks for what is left of it; or name another directory for a"
            " new run."
        )
        raise DamageError(message)
    message = (
        f"A store was requested whose first directory, {first}, has no manifest; but there is"
        f" {path}: {_describe(path, label)}. Name the directories of that run in the order in which"
        " they were named when it began, or empty ones."
    )
    raise StoreFormatError(message)


def _says_nothing(page: bytes) -> bool:
    if not any(page) or _HEADER.fullmatch(page) is not None:
        return True
    head = parse_head(page)
    return head is not None and not head.generation


def _describe(path: Path, label: Label | None) -> str:
    if not path.is_file():
        return "there is no such file"
    if label is None:
        return "its header is damaged, or it is no data file of a store"
    return f"it is file {label.index} of {label.count} of run {label.run}"
