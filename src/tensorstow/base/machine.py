"""Which machine this process is on."""

import socket
from pathlib import Path

from tensorstow.base.cores import read_or_empty

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> list[str]:
    """Return the machine's name, and what tells it from others of that name.

    Containers of one machine are machines of their own if they have names of their own.
    """
    return [socket.gethostname(), read_or_empty(_BOOT).strip()]
