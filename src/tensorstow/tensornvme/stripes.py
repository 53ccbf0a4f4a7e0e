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


def take_stripes(files: ScratchFiles, nbytes: int) -> tuple[Stripe, ...]:
    """Return space for a tensor of ``nbytes``; raises DirectoryError if a disk has too little.

    Every file gets an equal part, but none of less than 1 MiB.
    """
    count = max(1, min(len(files.files), nbytes // _LEAST_STRIPE))
    width = round_up(-(-nbytes // count), ALIGN)
    taken: list[Stripe] = []
    try:
        for start in range(0, nbytes, max(width, 1)):
            stop = min(start + width, nbytes)
            taken.append(Stripe(files.allocate(stop - start), start, stop))
    except BaseException:
        release_stripes(files, taken)
        raise
    return tuple(taken)


def release_stripes(files: ScratchFiles, stripes: Iterable[Stripe]) -> None:
    """Make the space of ``stripes`` free."""
    files.release(stripe.extent for stripe in stripes)
