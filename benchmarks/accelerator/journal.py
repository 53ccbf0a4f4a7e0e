"""Measurements that outlive their process: lines of JSON, on the disk before the next begins.

[Note: Processes] A machine's speed differs from one process's time to another's, and a process may
end at any moment: its time is up, or what it measures crashes. So each begins with the same anchor,
and what it measured is compared with others' by that (``gpu_rounds.outcomes_of``). That holds for
one kind of machine alone: between two, link, host memory and disk differ by other factors than
compute. So each entry has the facts of its machine, and only entries of one kind are read.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
_ALWAYS = {"kind", "process", "machine"}
"""What each entry has; a file of an older form has others."""
_KIND = ("accelerator", "torch", "cpu", "cores")
"""The facts of a machine (``measure.machine_facts``) that are alike on machines of one kind."""


class Journal:
    """Entries of one kind of machine, in order ([Note: Processes])."""

    def __init__(self, path: Path | None, machine: Mapping[str, Any] | None) -> None:
        """Read what is there; its last line may have been cut off.

        Args:
            path: The file; without one, entries live as long as this object.
            machine: The facts of the machine that measures; None where nothing is to be added: that
                of the newest entry.
        """
        self._path = path
        entries = list(_read(path)) if path is not None and path.exists() else []
        if machine is None and entries:
            machine = entries[-1]["machine"]
        self.machine = dict(machine or {})
        """The facts of the machine that measured."""
        kind = _kind_of(self.machine)
        self._entries = [entry for entry in entries if _kind_of(entry["machine"]) == kind]
        self.process = 1 + max((entry["process"] for entry in entries), default=0)
        """The number of this process among those that wrote here."""

    def add(self, kind: str, **values: Any) -> Entry:  # noqa: ANN401  # whatever JSON takes
        """Write one line; return when it is on the disk."""
        entry = {"kind": kind, "process": self.process, "machine": self.machine, **values}
        self._entries.append(entry)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                # First a new line: the last one may have been cut off.
                file.write(f"\n{json.dumps(entry)}\n")
                file.flush()
                os.fsync(file.fileno())
        return entry

    def of(self, kind: str, **values: Any) -> list[Entry]:  # noqa: ANN401
        """Return the entries of a kind that have these values."""
        wanted = {"kind": kind, **values}.items()
        return [entry for entry in self._entries if wanted <= _plain(entry).items()]


def _kind_of(machine: Mapping[str, Any]) -> list[Any]:
    return [machine.get(fact) for fact in _KIND]


def _plain(entry: Entry) -> Entry:
    """Leave out what cannot be compared as a member of a set."""
    return {k: v for k, v in entry.items() if not isinstance(v, list | dict)}


def _read(path: Path) -> Iterator[Entry]:
    """Yield what can be read: not a line that was cut off, nor one of an older form."""
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict) and entry.keys() >= _ALWAYS:
            yield entry
