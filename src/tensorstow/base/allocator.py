"""Tells the C library's allocator to return large freed blocks to the system.

[Note: Large blocks] glibc allocates large blocks by mmap and unmaps them when freed, but each free
raises the threshold (up to 32 MiB), and smaller blocks come from the heap, where one live block
keeps everything below it. Units that are gathered and freed one after the other then hold several
times the memory in use. A fixed threshold prevents that, at the cost of fresh pages each time.

GPT-2 of 124 M in fp32, 4 x 128 tokens, two cores, everything on disk: 2.88 s, 1.04 M page faults
and 1,980 MiB at the peak with 1 MiB; 2.34 s, 0.31 M and 2,700 MiB with 32 MiB; 2.20 s, 0.24 M and
2,970 MiB with 128 MiB. With 8 MiB, and malloc_trim() between blocks whenever the process holds more
than what was ever in use by 64 MiB: 2.56 s, 0.54 M and 2,140 MiB; a trim takes 10 ms.
"""

import ctypes
import logging
import os

logger = logging.getLogger("tensorstow")

_M_MMAP_THRESHOLD = -3
LARGE_BLOCK = 1 << 20
"""Bytes from which on a freed block goes back."""
_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold")
"""The user's: a variable of the environment, and a name in GLIBC_TUNABLES."""


def give_back_large_blocks() -> bool:
    """Return freed blocks of a MiB and more to the system, and return whether it does so.

    Holds for the whole process, until it ends. A threshold of the user's own (the variable
    MALLOC_MMAP_THRESHOLD_, or glibc.malloc.mmap_threshold in GLIBC_TUNABLES) is kept.
    """
    variable, tunable = _OWN_SETTINGS
    if variable in os.environ or tunable in os.environ.get("GLIBC_TUNABLES", ""):
        logger.info("glibc's threshold of large blocks is the user's: it is kept")
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.warning("This C library has no mallopt: freed memory may stay with the process")
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK))
