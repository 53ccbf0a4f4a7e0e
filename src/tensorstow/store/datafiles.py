"""The data files: one per directory, with a label that names the run, and two heads.

[Note: Heads] SQLite cannot tell damage to its log from an unfinished transaction: it returns to the
last complete one, and treats a deleted log as no log. So each transaction of the manifest has a
number, which is written to each data file and synced before the transaction is reported. Two slots
are written in turn, so that a torn write leaves the other one.

    manifest == head       as it should be
    manifest == head + 1   the process died before it had written the head: never reported
    manifest <  head       the manifest has lost a reported transaction: an error
    manifest >  head + 1   the data file is an older copy: an error
"""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorstow.base.errors import DamageError, StoreFormatError
from tensorstow.base.regular_file import is_there, open_regular, regular_stream
from tensorstow.io.files import File, IoFuture, wait_for_all
from tensorstow.store.durability import SystemDisk
from tensorstow.store.records import HEADER_BYTES, PAGE

PATTERN = "states-*.bin"
_HEADER = re.compile(rb"tensorstow states 1\nrun ([!-~]+)\nfile (\d+) of (\d+)\n\0*")
_SLOTS = 2
_TEXT = re.compile(
    rb"tensorstow head 1\nrun ([!-~]+)\ntransaction (\d{1,18})\n"
    rb"generation (\d{1,18}) of step (-?\d{1,18})\n"
)


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


@dataclass(frozen=True, slots=True)
class Head:
    """The manifest's newest transaction, as a data file records it."""

    run: str
    transaction: int = 0
    """The last one of the manifest that was reported."""
    generation: int = 0
    """The newest one then; 0: none yet."""
    step: int = 0

    def page(self) -> bytes:
        """Return it as a page, with a checksum."""
        text = (
            f"tensorstow head 1\nrun {self.run}\ntransaction {self.transaction}\n"
            f"generation {self.generation} of step {self.step}\n"
        ).encode("ascii")
        return (text + hashlib.sha256(text).hexdigest().encode() + b"\n").ljust(PAGE, b"\0")

    def __str__(self) -> str:
        """Return it as text for error messages."""
        if not self.generation:
            return "no commit yet"
        return f"generation {self.generation} (step {self.step}) as the newest"


def first_pages(run: str) -> bytes:
    """Return the heads of a new file."""
    return Head(run).page() * _SLOTS


def sync_heads(disk: SystemDisk, files: Sequence[File], head: Head) -> None:
    """Write ``head`` to all ``files``, durably."""
    # A bytearray, because torch warns about memory that it must not write to, such as bytes.
    page = torch.frombuffer(bytearray(head.page()), dtype=torch.uint8)
    futures: list[IoFuture] = []
    try:
        # extend() takes one write at a time: after an error the list has those that have begun.
        futures.extend(file.write(page, _slot_at(head.transaction)) for file in files)
    finally:
        wait_for_all(futures)  # all read from the page, which ends with this function
    for file in files:
        disk.sync_file(file)


def put_head(path: Path, head: Head) -> None:
    """Write ``head`` to the data file ``path``, durably, whatever is there."""
    with os.fdopen(open_regular(path, os.O_RDWR | os.O_NOFOLLOW), "r+b") as file:
        file.seek(_slot_at(head.transaction))
        file.write(head.page())
        file.flush()
        os.fsync(file.fileno())


def read_head(path: Path, run: str) -> Head:
    """Return the newer head in the data file ``path``; raise DamageError if it has none."""
    head = find_head(path, run)
    if head is None:
        message = (
            f"{path} was requested, a data file of run {run}, and both records of what the manifest"
            f" must have, {HEADER_BYTES - PAGE} bytes at offset {PAGE}, are damaged. Look at"
            f" `dmesg` and the drive's health. `tensorstow run recover {path.parent}` (the run's"
            " first directory) writes them anew; or put the file back from a copy of the"
            " directories."
        )
        raise DamageError(message)
    return head


def find_head(path: Path, run: str) -> Head | None:
    """Return the newer head of ``run`` in the data file ``path``; None if there is none."""
    with regular_stream(path, os.O_RDONLY | os.O_NOFOLLOW) as file:
        pages = [file.read(PAGE) for _ in range(1 + _SLOTS)][1:]  # the first is the label
    heads = [head for page in pages if (head := parse_head(page)) is not None and head.run == run]
    return max(heads, key=lambda head: head.transaction, default=None)


def find_difference(heads: Sequence[tuple[Path, Head]], transaction: int) -> str | None:
    """Return the error of a manifest whose last transaction has this number; None: none.

    [Note: Heads] above.
    """
    for path, head in heads:
        if head.transaction > transaction:
            return (
                f"it has lost what was reported: {path} knows {head}, of transaction"
                f" {head.transaction}, and the manifest ends with {transaction}"
            )
        if head.transaction < transaction - 1:
            return (
                f"it is at transaction {transaction}, and {path}, an older copy by that, at"
                f" {head.transaction} with {head}"
            )
    return None


def parse_head(page: bytes) -> Head | None:
    """Return the head that a page is; None if it is none, or damaged."""
    match = _TEXT.match(page)
    if match is None:
        return None
    run, transaction, generation, step = match.groups()
    head = Head(run.decode("ascii"), int(transaction), int(generation), int(step))
    # The page is made anew and compared as a whole, its checksum and its padding too.
    return head if head.page() == page else None


def _slot_at(transaction: int) -> int:
    # In turn, so that a write which is torn leaves the head before; the first page is the label.
    return PAGE + transaction % _SLOTS * PAGE
