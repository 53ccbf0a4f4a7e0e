"""Checks that the open files are still the ones that their paths name.

A file that is deleted or moved while open still takes writes and syncs, but its data cannot be
found later. This is detected by comparing the open file with the one at the path.
"""

import os
from pathlib import Path

from tensorstow.base.errors import UnlinkedError


class Links:
    """The files that a store has open, and the paths that must lead to them."""

    def __init__(self) -> None:
        """Begin with none."""
        self._wanted: dict[Path, os.stat_result] = {}

    def expect(self, path: Path, opened: os.stat_result) -> None:
        """Record that ``path`` leads to the open file ``opened``."""
        self._wanted[path] = opened

    def check(self) -> None:
        """Raise UnlinkedError unless every path leads to the file that is open."""
        for path, opened in self._wanted.items():
            difference = _difference(path, opened)
            if difference is not None:
                message = (
                    f"The run commits to {path}, and {difference}: the file that this process has"
                    " open was deleted or moved, and so was what is committed in it. Put it back"
                    " where it was; or go on in another directory with"
                    " optimizer.commit_to(directory), which writes all that a resume needs there."
                )
                raise UnlinkedError(message)


def _difference(path: Path, opened: os.stat_result) -> str | None:
    try:
        facts = path.stat()
    except OSError as error:
        return f"it is not there any more ({error.strerror})"
    return None if os.path.samestat(facts, opened) else "another file is there now"
