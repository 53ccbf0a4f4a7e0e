"""Tells the C library's allocator to return large freed blocks to the system.

[Note: Large blocks] glibc serves large blocks by mappings of their own, which go back to the system
when freed, but with every one that is freed it takes larger ones (up to 32 MiB) from its heap from
then on, where a block that lives on keeps everything below it. Units that are gathered and let go
of, one after the other, then hold several times what is in use. A fixed threshold ends that, at the
price of fresh pages for each such block.
"""

import ctypes
import logging

logger = logging.getLogger("tensorstow")

_M_MMAP_THRESHOLD = -3
_THRESHOLD = 1 << 20


def give_back_large_blocks() -> bool:
    """Let blocks of a MiB and more go back when freed; return whether the C library can do that.

    Holds for the whole process, until it ends.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        logger.warning("This C library has no mallopt: freed memory may stay with the process")
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _THRESHOLD))
