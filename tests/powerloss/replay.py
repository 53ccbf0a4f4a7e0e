"""What is on a disk after the power was lost: synced writes for certain, of the others anything."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from powerloss.events import (
    Created,
    DirectorySynced,
    Event,
    FileSynced,
    ManifestCommitted,
    Promised,
    Written,
)

SECTOR = 512
"""What a drive writes whole or not at all."""


class Platter:
    """What is durable, and what may be or not."""

    def __init__(self) -> None:
        self.durable: dict[Path, bytearray] = {}
        self.pending: dict[Path, list[Written]] = {}
        self.unnamed: set[Path] = set()

    def take(self, event: Event) -> None:
        match event:
            case Created(path, contents):
                self.durable[path] = bytearray()
                self.pending[path] = [Written(path, 0, contents)]
                self.unnamed.add(path)
            case Written(path):
                self.pending[path].append(event)
            case FileSynced(path):
                for write in self.pending[path]:
                    _apply(self.durable[path], write.offset, write.data)
                self.pending[path] = []
            case DirectorySynced(path):
                self.unnamed = {name for name in self.unnamed if name.parent != path}
            case ManifestCommitted(path, image):
                self.durable[path] = bytearray(image)
                self.pending[path] = []
            case Promised():
                pass


def lose_power(events: Sequence[Event], dice: random.Random) -> dict[Path, bytes]:
    """Return the files that are left when the power goes after ``events``.

    Each write that no barrier followed is dropped, applied, or torn into sectors of which some
    are applied, by the dice; so is each name that its directory was not synced after.
    """
    platter = Platter()
    for event in events:
        platter.take(event)
    for path, writes in platter.pending.items():
        for write in writes:
            _perhaps(platter.durable[path], write, dice)
    return {
        path: bytes(data)
        for path, data in platter.durable.items()
        if path not in platter.unnamed or dice.random() < 0.5
    }


def put_back(files: Mapping[Path, bytes], root: Path, target: Path) -> None:
    """Write ``files``, which were under ``root``, to the same places under ``target``."""
    for path, data in files.items():
        place = target / path.relative_to(root)
        place.write_bytes(data)


def _perhaps(data: bytearray, write: Written, dice: random.Random) -> None:
    fate = dice.choice(("dropped", "applied", "torn"))
    if fate == "applied":
        _apply(data, write.offset, write.data)
    if fate == "torn":
        for start in range(0, len(write.data), SECTOR):
            if dice.random() < 0.5:
                _apply(data, write.offset + start, write.data[start : start + SECTOR])


def _apply(data: bytearray, offset: int, written: bytes) -> None:
    if len(data) < offset:
        data.extend(bytes(offset - len(data)))
    data[offset : offset + len(written)] = written
