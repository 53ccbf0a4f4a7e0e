"""What is known of one key of a DeepSpeed configuration."""

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from tensorstow.deepspeed.config.kinds import ANYTHING, Kind


class Answer(Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    NO_MEANING = "no meaning"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Key:
    """``off``: the value when absent, or that asks for nothing; ``note``: why, or what instead.

    ``spellings``: older paths of the same key, ``also``: others that are as good. A path that ends
    in ``.*`` is all of a section.
    """

    path: str
    kind: Kind
    off: Any
    answer: Answer
    note: str = ""
    spellings: tuple[str, ...] = ()
    also: tuple[str, ...] = ()


def honoured(path: str, kind: Kind, *spellings: str, off: object) -> Key:
    """Return a key that decides something; ``off`` is what holds without it."""
    return Key(path, kind, off, Answer.HONOURED, spellings=spellings)


def idle(section: str, kind: Kind, *names: str, why: str, off: object = None) -> list[Key]:
    """Return keys of a section that mean nothing here, all for one reason."""
    return [Key(section + name, kind, off, Answer.NO_MEANING, why) for name in names]


def refused(path: str, kind: Kind, *, off: object, instead: str) -> Key:
    """Return a key that is refused unless it has its ``off`` value."""
    return Key(path, kind, off, Answer.REFUSED, instead)


def section(path: str, *, instead: str) -> Key:
    """Return a section that is refused as a whole where anything in it is switched on."""
    return Key(f"{path}.*", ANYTHING, None, Answer.REFUSED, instead)


def with_prefix(prefix: str, keys: list[Key]) -> list[Key]:
    """Give keys their name without ``prefix`` besides."""
    return [replace(k, also=(*k.also, k.path.replace(prefix, ""))) for k in keys]
