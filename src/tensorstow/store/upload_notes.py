"""Notes, in a run's directory, of snapshots whose copies elsewhere are not complete yet.

A note is durable before its snapshot is made, and removed when the copy is complete. So a process
that is killed leaves one for each copy that it did not complete, and the next one goes on with it.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from tensorstow.base.errors import DirectoryError, named
from tensorstow.base.new_file import NewFile
from tensorstow.base.regular_file import read_regular, remove_file

logger = logging.getLogger("tensorstow")

_PREFIX, _SUFFIX = "upload-", ".json"
_MOST_BYTES = 1 << 16
_KEYS = {"snapshot", "to"}


def write_note(directory: Path, name: str, url: str) -> None:
    """Note, durably, that snapshot ``name`` is to be copied to ``url``.

    Raises:
        DirectoryError: The file cannot be written.
    """
    with NewFile(note_path(directory, name), mode=0o600) as file:
        with file.stream() as stream:
            stream.write(json.dumps({"snapshot": name, "to": url}).encode())
        file.publish()


def remove_note(directory: Path, name: str, url: str | None = None) -> None:
    """Remove the note of a snapshot, if there is one; only that of a copy to ``url``, if given."""
    if url is None or read_notes(directory).get(name) == url:
        remove_file(note_path(directory, name))


def read_notes(directory: Path) -> Mapping[str, str]:
    """Return the addresses by the names of the snapshots that are to be copied there.

    A file that is no note stays, with a warning.
    """
    notes = {}
    for path in note_files(directory):
        note = _read(path)
        if note is None:
            logger.warning(
                "%s does not say which snapshot was to be copied, and where. Push it with"
                " `tensorstow run push`, then remove the file",
                path,
            )
        else:
            notes[note["snapshot"]] = note["to"]
    return notes


def note_files(directory: Path) -> list[Path]:
    """Return the files that have names of notes."""
    with named("The directory", directory):
        return sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}"))


def is_note(path: Path) -> bool:
    """Return whether a file is a note."""
    return _read(path) is not None


def note_path(directory: Path, name: str) -> Path:
    """Return the path of the note of a snapshot."""
    return directory / f"{_PREFIX}{name}{_SUFFIX}"


def _read(path: Path) -> dict[str, str] | None:
    try:
        note = json.loads(read_regular(path, _MOST_BYTES, os.O_RDONLY | os.O_NOFOLLOW))
    except (DirectoryError, OSError, ValueError):
        return None
    is_note = isinstance(note, dict) and note.keys() == _KEYS
    if not is_note or not all(isinstance(value, str) for value in note.values()):
        return None
    # `remove_note` finds a note by its snapshot's name, so a file of another name is none.
    return note if path == note_path(path.parent, note["snapshot"]) else None
