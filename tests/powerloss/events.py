"""What reaches the disk, and what makes it durable, in the order in which it happens.

Whatever writes to a store's files can be simulated, as long as it can be told as these events: a
write belongs where it completed, since a barrier covers no write that is still in flight.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Created:
    path: Path
    contents: bytes


@dataclass(frozen=True)
class Written:
    path: Path
    offset: int
    data: bytes


@dataclass(frozen=True)
class FileSynced:
    path: Path


@dataclass(frozen=True)
class DirectorySynced:
    path: Path


@dataclass(frozen=True)
class ManifestCommitted:
    """A transaction ended. SQLite is trusted: from here on the manifest is this image."""

    path: Path
    image: bytes


@dataclass(frozen=True)
class Promised:
    """A commit of ``step`` returned to its caller."""

    step: int


Event = Created | Written | FileSynced | DirectorySynced | ManifestCommitted | Promised
