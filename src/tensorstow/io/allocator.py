"""Has torch's large blocks of host memory allocated from a cache of freed ones.

[Note: Large blocks] Units that are gathered and freed one after the other take several times their
peak of memory in each step. The C library returns large freed blocks to the system, and a step then
waits for as many new pages; or it keeps them in a heap whose gaps the next ones do not fit in. The
native core's allocator keeps freed blocks and moves their pages into the next ones ([Note: Pages
that move] in csrc/base/caching_allocator.h).

ADR 0055 has what each way takes, in seconds, page faults and memory.
"""

import logging
import os

import torch

from tensorstow import _native
from tensorstow.base.sizes import round_up

logger = logging.getLogger("tensorstow")

_LIBRARY = "libc10.so"
"""The one of torch's libraries that allocates tensors."""
_HUGE_PAGE = 2 << 20
"""Bytes that blocks of the cache are rounded up to."""
_OWN_SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "glibc.malloc.mmap_threshold")
"""The user's: a variable of the environment, and a name in GLIBC_TUNABLES."""


def cache_large_blocks() -> bool:
    """Keep large freed blocks for the next tensors; return whether that is so.

    Holds for torch's tensors in host memory, for the whole process, until it ends. All that is held
    is what was in use at once lately. An allocator of the user's own stays in place: one that is
    preloaded (LD_PRELOAD), or the C library's with a threshold of large blocks (the variable
    MALLOC_MMAP_THRESHOLD_, or glibc.malloc.mmap_threshold in GLIBC_TUNABLES).
    """
    variable, tunable = _OWN_SETTINGS
    if variable in os.environ or tunable in os.environ.get("GLIBC_TUNABLES", ""):
        logger.info("glibc's threshold of large blocks is the user's: it is kept")
        return False
    if _native.cache_blocks_of(_LIBRARY):
        return True
    logger.info(
        "torch %s allocates as before: its libc10.so gets memory in another way than from the C"
        " library's posix_memalign",
        torch.__version__,
    )
    return False


def is_large(nbytes: int) -> bool:
    """Return whether a block of ``nbytes`` comes from the cache, and not from the C library.

    The cache takes blocks that whole huge pages enlarge by a third at most.
    """
    return round_up(nbytes, _HUGE_PAGE) - nbytes <= nbytes // 3


def empty_cache(nbytes: int | None = None) -> None:
    """Return freed blocks that are kept to the system: ``nbytes`` of them, or all.

    Call it where memory that is not torch's takes the place of tensors.
    """
    _native.empty_cache(nbytes)
