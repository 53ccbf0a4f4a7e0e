"""The scratch files of this process, unlinked as they are, through /proc."""

import os
from pathlib import Path

DESCRIPTORS = Path("/proc/self/fd")


def scratch_files(directory: Path) -> list[Path]:
    """Return a path to open each scratch file in ``directory`` by."""
    found = []
    for entry in sorted(DESCRIPTORS.iterdir(), key=lambda e: int(e.name)):
        try:
            target = entry.readlink()
        except FileNotFoundError:  # the descriptor of this very listing
            continue
        if target.is_relative_to(directory.resolve()):
            found.append(entry)
    return found


def read_scratch(directory: Path) -> list[bytes]:
    """Return the contents of the files; nothing of ours may be in flight."""
    return [path.read_bytes() for path in scratch_files(directory)]


def write_scratch(directory: Path, contents: list[bytes], nbytes: int | None = None) -> None:
    """Put back what ``read_scratch`` returned, or its first ``nbytes``."""
    for path, content in zip(scratch_files(directory), contents, strict=True):
        fd = os.open(path, os.O_RDWR)
        try:
            os.pwrite(fd, content[:nbytes], 0)
            os.fsync(fd)
        finally:
            os.close(fd)
