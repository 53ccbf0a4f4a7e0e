"""Space on disk for tensors, striped over scratch files in several directories."""

from collections.abc import Iterable
from dataclasses import dataclass

from tensorstow.base.sizes import round_up
from tensorstow.io.files import ALIGN
from tensorstow.io.scratch import ScratchExtent, ScratchFiles

_LEAST_STRIPE = 1 << 20  # smaller stripes on more disks are slower, not faster


@dataclass(frozen=True, slots=True)
class Stripe:
    """The bytes ``start`` to ``stop`` of a tensor, and their place on disk."""

    extent: ScratchExtent
    start: int
    stop: int


def take_stripes(files: ScratchFiles, sizes: Iterable[int]) -> tuple[tuple[Stripe, ...], ...]:
    """Return space for tensors of these bytes; raises DirectoryError if a disk has too little.

    Every file gets an equal part of a tensor, but none of less than 1 MiB.
    """
    taken: list[list[Stripe]] = []
    try:
        for nbytes in sizes:
            count = max(1, min(len(files.files), nbytes // _LEAST_STRIPE))
            width = round_up(-(-nbytes // count), ALIGN)
            taken.append([])
            for start in range(0, nbytes, max(width, 1)):
                stop = min(start + width, nbytes)
                taken[-1].append(Stripe(files.allocate(stop - start), start, stop))
    except BaseException:
        release_stripes(files, taken)
        raise
    return tuple(map(tuple, taken))


def release_stripes(files: ScratchFiles, tensors: Iterable[Iterable[Stripe]]) -> None:
    """Free the space of these tensors' stripes."""
    files.release(stripe.extent for stripes in tensors for stripe in stripes)
