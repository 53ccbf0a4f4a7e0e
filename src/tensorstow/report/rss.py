"""The resident memory of this process, now and at its peak, and a thread that samples."""

import ctypes
import mmap
import re
import threading
from pathlib import Path
from typing import Self

SAMPLES_PER_SECOND = 20

_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(_STATM.read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def peak_bytes() -> int | None:
    """Return the peak resident memory in bytes; None if the kernel does not record it.

    Not getrusage(): its figure starts from that of the process that did the exec.
    """
    match = re.search(r"VmHWM:\s*(\d+) kB", _STATUS.read_text(encoding="utf-8", errors="replace"))
    return int(match[1]) * 1024 if match else None


def return_freed_memory() -> None:
    """Return freed memory to the system, so that resident memory is memory in use."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None:
        trim(0)


class PeriodicSampler:
    """Takes samples in a thread while the block runs: at its start and end, and every 50 ms."""

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def take(self) -> None:
        """Take a sample now; subclasses define it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self.take()
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self.take()

    def _run(self) -> None:
        while not self._stop.wait(1 / SAMPLES_PER_SECOND):
            self.take()
