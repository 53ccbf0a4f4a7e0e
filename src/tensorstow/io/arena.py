"""Page-aligned host memory: one mapping, cut into parts."""

import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from tensorstow import _native
from tensorstow.base.errors import BudgetError
from tensorstow.base.sizes import format_bytes, round_up
from tensorstow.io.allocator import check_memory_limit
from tensorstow.io.numa_binding import prefer_own_node

_Read = TypeVar("_Read")
PAGE = mmap.PAGESIZE
TENSOR_ALIGN = 64
"""Tensors in memory begin at multiples of this, as torch's own do."""
_HUGE_PAGE = 2 << 20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, linux/mman.h: Linux 4.14
_MOVE_PAGES = 1 | 2 | 4  # MREMAP_MAYMOVE, _FIXED, _DONTUNMAP: Linux 5.7
_INTO_A_HOLE = 0x100000  # MAP_FIXED_NOREPLACE: Linux 4.17
# Python's default is a shared mapping: it gets no huge pages, and a forked child would write to it.
_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_libc = ctypes.CDLL(None)
_ADDRESS, _LENGTH, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
# Without types ctypes would cut addresses to 32 bits.
_libc.mremap.argtypes = (_ADDRESS, _LENGTH, _LENGTH, _NUMBER, _ADDRESS)
_libc.mmap.argtypes = (_ADDRESS, _LENGTH, _NUMBER, _NUMBER, _NUMBER, ctypes.c_ssize_t)
_libc.mremap.restype = _libc.mmap.restype = _ADDRESS


class Arena:
    """An anonymous mapping of ``nbytes``, zero-filled, in huge pages where the system has them.

    Pages use no memory until they are touched. Under a limit of memory all are touched at once,
    so that nothing else gets what they will need; ``on_demand`` leaves that to the caller, which
    asks for each use (``check_memory_limit``).

    With ``in_children=False`` a forked process reads zeros and shares no page, so that a transfer
    in flight never meets copy-on-write. The child keeps the mapping: without it, freeing ours there
    could unmap memory that took its place.
    """

    def __init__(self, nbytes: int, *, in_children: bool, on_demand: bool = False) -> None:
        """Map ``nbytes`` (rounded up to a page).

        Raises BudgetError if the system or the user's limit of memory has no room.
        """
        self.nbytes = max(PAGE, round_up(nbytes, PAGE))
        if not on_demand:
            check_memory_limit(self.nbytes)
        # One extra huge page lets the first byte sit on the boundary of one.
        try:
            self._map = mmap.mmap(-1, self.nbytes + _HUGE_PAGE, flags=_PRIVATE)
        except OSError as error:
            message = (
                f"{format_bytes(self.nbytes)} of host memory were requested and the system has no"
                f" room for the mapping ({error.strerror}). Lower the budget."
            )
            raise BudgetError(message) from error
        self._in_children = in_children
        self._advise_kernel()
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._skip = -start % _HUGE_PAGE
        self.address = start + self._skip
        prefer_own_node(self.address, self.nbytes)
        if not on_demand and _native.memory_limit():
            # After the choice of the node: a page lies where its first touch puts it.
            ctypes.memset(self.address, 0, self.nbytes)

    def tensor(self, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D view of ``count`` elements from byte ``offset``; it keeps the mapping."""
        if count == 0:
            return torch.empty(0, dtype=dtype, device="cpu")  # frombuffer refuses it
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._skip + offset)

    def drop(self) -> None:
        """Give all pages back; the next touch finds zeros."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def take_pages(self, other: "Arena") -> bool:
        """Have the pages of an arena of the same size, and their bytes; it has none then.

        Fresh pages are filled with zeros by the kernel, which takes as long as a copy of them.
        Returns False where an older kernel cannot move them: nothing has changed.
        """
        moved = _libc.mremap(other.address, self.nbytes, self.nbytes, _MOVE_PAGES, self.address)
        if moved == self.address:
            other.drop()  # a huge page may have had more than was moved
            return True
        # The kernel takes away what was here before it finds that it has no room for the move. Only
        # a hole is mapped again: another thread may have mapped something there meanwhile.
        readable = mmap.PROT_READ | mmap.PROT_WRITE
        flags = _PRIVATE | _INTO_A_HOLE
        if _libc.mmap(self.address, self.nbytes, readable, flags, -1, 0) == self.address:
            self._advise_kernel()
            prefer_own_node(self.address, self.nbytes)
        return False

    def _advise_kernel(self) -> None:
        """Say of the whole mapping how it is used."""
        if self.nbytes >= _HUGE_PAGE:  # a small one would take a whole huge page for nothing
            self._advise(mmap.MADV_HUGEPAGE)
        if not self._in_children:
            self._advise(_WIPE_ON_FORK)

    def _advise(self, advice: int) -> None:
        # A kernel built without huge pages answers EINVAL: the mapping works all the same.
        try:
            self._map.madvise(advice)
        except OSError:
            if advice != mmap.MADV_HUGEPAGE:
                raise


def read_ahead(
    sizes: Sequence[int], start: Callable[[int, torch.Tensor], _Read], ahead: int
) -> Iterator[tuple[_Read, torch.Tensor]]:
    """Yield the read of each piece, to be waited for, while the next ``ahead`` are read too.

    ``start`` begins the read of a piece, by its number, into memory of its size. The memory is
    yielded with the read, and is valid until the next one is asked for.
    """
    # One slot more than reads ahead: the caller has the piece that was yielded last.
    largest, slots = max(sizes, default=0), ahead + 1
    arena = Arena(slots * largest, in_children=False)
    reads: deque[tuple[_Read, torch.Tensor]] = deque()
    for number in range(len(sizes) + ahead):
        if number < len(sizes):
            memory = arena.tensor(number % slots * largest, sizes[number], torch.uint8)
            reads.append((start(number, memory), memory))
        if number >= ahead:
            yield reads.popleft()
