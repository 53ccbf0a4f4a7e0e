"""Tells the C library's allocator to return large freed blocks to the system.

[Note: Large blocks] glibc allocates large blocks by mmap and unmaps them when freed, but each free
raises the threshold (up to 32 MiB), and smaller blocks come from the heap, where one live block
keeps everything below it. Units that are gathered and freed one after the other then hold several
times the memory in use. A fixed threshold prevents that, at the cost of fresh pages each time.
"""

import ctypes
import logging

logger = logging.getLogger("tensorstow")

_M_MMAP_THRESHOLD = -3
_THRESHOLD = 1 << 20


def give_back_large_blocks() -> bool:
    """Return freed blocks of a MiB and more to the system, if the C library supports it (True).

    Holds for the whole process, until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.warning("This C library has no mallopt: freed memory may stay with the process")
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _THRESHOLD))
