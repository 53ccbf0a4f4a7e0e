"""``read_text``: the text of a file that a user names, which may be no text and no file."""

from pathlib import Path

from tensorstow.base.regular_file import read_regular

MOST_BYTES = 64 << 20
"""No configuration, index or profile is larger."""


def read_text(path: Path, encoding: str = "utf-8", errors: str = "strict") -> str:
    """Return the text of a regular file; a pipe or a device would be waited for, or has no end.

    Raises:
        DirectoryError: It is no regular file, or it is larger than ``MOST_BYTES``.
        OSError: There is no such file, or it cannot be read.
        ValueError: It is no text, or ``path`` can be no path.
    """
    return read_regular(path, MOST_BYTES).decode(encoding, errors)
