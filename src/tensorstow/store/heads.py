"""Heads: each data file records the manifest's newest transaction, so that a loss is noticed.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorstow.base.errors import DamageError
from tensorstow.base.regular_file import open_regular, regular_stream
from tensorstow.io.files import File, IoFuture
from tensorstow.store.durability import SystemDisk
from tensorstow.store.records import HEADER_BYTES, PAGE

_SLOTS = 2
_TEXT = re.compile(
    rb"tensorstow head 1\nrun ([!-~]+)\ntransaction (\d{1,18})\n"
    rb"generation (\d{1,18}) of step (-?\d{1,18})\n"
)


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
    page = torch.frombuffer(bytearray(head.page()), dtype=torch.uint8)
    futures: list[IoFuture] = []
    try:
        futures.extend(file.write(page, _slot_at(head.transaction)) for file in files)
    finally:
        for future in futures:  # all read from the page, which ends with this function
            future.wait()
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
    return head if head.page() == page else None


def _slot_at(transaction: int) -> int:
    # In turn, so that a write which is torn leaves the head before; the first page is the label.
    return PAGE + transaction % _SLOTS * PAGE
