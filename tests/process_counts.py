"""What the whole process has open."""

from pathlib import Path


def open_descriptors() -> int:
    """Return the number of files that the process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))
