"""Which machine a process is on, and whether a process that is named elsewhere is still alive."""

import os
import socket
from pathlib import Path
from typing import Any

from tensorstow.base.cores import read_or_empty

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> list[str]:
    """Return the machine's name, and what tells it from others of that name.

    Containers of one machine are machines of their own if they have names of their own.
    """
    return [socket.gethostname(), read_or_empty(_BOOT).strip()]


def process_id() -> dict[str, Any]:
    """Return what tells this process from all others, on any machine, as JSON."""
    return {"machine": _machine_and_pids(), "pid": os.getpid(), "began": _began(os.getpid())}


def is_gone(process: dict[str, Any]) -> bool | None:
    """Return whether a process has ended; None if it was on another machine, and nobody knows.

    Args:
        process: What its ``process_id()`` was.

    Raises:
        LookupError, TypeError, ValueError: It is not of ``process_id()``.
    """
    machine, pid, began = list(process["machine"]), int(process["pid"]), str(process["began"])
    # Another process may have the number by now: when it began tells them apart.
    return _began(pid) != began if machine == _machine_and_pids() else None


def _machine_and_pids() -> list[str]:
    """Return the machine, and what tells its numbers of processes from those of containers."""
    try:
        return [*machine_id(), str(Path("/proc/self/ns/pid").readlink())]
    except OSError:
        return [*machine_id(), ""]


def _began(pid: int) -> str:
    """Return when a process began, in ticks since the boot; "" if there is none."""
    fields = read_or_empty(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 else ""  # the 22nd, of which two are before the ")"
