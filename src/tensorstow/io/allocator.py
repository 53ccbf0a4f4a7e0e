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
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.keywords import names_keywords
from tensorstow.base.sizes import Size, format_bytes, parse_size, round_up

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


@names_keywords
def set_memory_limit(limit: Size | None) -> None:
    """Refuse host memory to tensors with which this process would have more than ``limit``.

    What counts is the process's own resident memory: tensors, buffers, Python, and libraries as
    they are now. Files that are mapped later, shared memory, and pinned memory of a GPU's driver do
    not count. Near the limit, freed memory that allocators keep goes back to the system first.

    A tensor of the CPU that does not fit raises torch's ``RuntimeError`` ("can't allocate memory"),
    and a buffer of tensorstow's :class:`~tensorstow.errors.BudgetError`, before they get memory.
    Below a limit, tensors have all their pages from the start. NumPy and other libraries are not
    asked: what they take counts when the next tensor is.

    Args:
        limit: Bytes, or a size like ``"6GiB"``. ``tensorstow plan`` prints what a run needs. None
            takes the limit away.

    Raises:
        OptionError: The process has more than that already, or torch's tensors come from an
            allocator of the user's own, which is not asked.
    """
    if limit is None:
        _native.set_memory_limit(0)
        return
    nbytes = parse_size(limit, "limit")
    if not cache_large_blocks():
        message = (
            "A limit of memory needs torch's blocks from tensorstow's allocator, and another one is"
            " in use: MALLOC_MMAP_THRESHOLD_ or glibc.malloc.mmap_threshold is set, or a library is"
            " preloaded (the log names others). Start Python without it."
        )
        raise OptionError(message)
    resident = _native.resident_bytes()
    if resident == 0:
        message = (
            "A limit of memory needs to know what the process has, and /proc/self/statm cannot be"
            " read. Mount /proc."
        )
        raise OptionError(message)
    if resident > nbytes:
        message = (
            f"A limit of {format_bytes(nbytes)} of memory was requested, and the process has"
            f" {format_bytes(resident)} already. Set it higher."
        )
        raise OptionError(message)
    _native.set_memory_limit(nbytes)


def fits_memory_limit(nbytes: int) -> bool:
    """Return whether ``nbytes`` more are within the limit that a user has set, if any."""
    return _native.fits_memory_limit(nbytes)


def memory_limit() -> int | None:
    """Return the bytes that a user has allowed the process; None: there is no limit."""
    return _native.memory_limit() or None


def room_below_limit() -> int | None:
    """Return the bytes that the limit leaves the process; None: there is no limit."""
    limit = memory_limit()
    return None if limit is None else max(limit - _native.resident_bytes(), 0)


def check_memory_limit(nbytes: int) -> None:
    """Raise BudgetError if ``nbytes`` more would exceed the limit that a user has set."""
    if fits_memory_limit(nbytes):
        return
    message = (
        f"{format_bytes(nbytes)} of host memory were requested, and the process has"
        f" {format_bytes(_native.resident_bytes())} of the {format_bytes(_native.memory_limit())}"
        " that tensorstow.set_memory_limit allows. Lower the budget, or raise the limit."
    )
    raise BudgetError(message)


def empty_cache(nbytes: int | None = None) -> None:
    """Return freed blocks that are kept to the system: ``nbytes`` of them, or all.

    Call it where memory that is not torch's takes the place of tensors.
    """
    _native.empty_cache(nbytes)
