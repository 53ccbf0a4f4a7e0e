"""Where a large parameter may be cut so that torch's kernels give the same bits.

[Note: Cuts that change no bit]
A kernel of torch's takes a tensor in ranges, one for each thread, and each range in vectors; the
few elements that fill no vector, at the end of a range, go through scalar code. In 16 bits the
two round differently (`add` with `alpha` keeps a float between its two steps in one and not in
the other), so whether an element is at such an end is part of the result. Hence:

* every thread's range begins a piece of its own, unless all ranges are whole vectors;
* a piece is a multiple of VECTOR elements, except that the end of a range ends a slice;
* what one call gets (a slice) is either too little to be shared among threads, or is shared at
  whole vectors.

A tensor's ranges follow from its length and the number of threads (at::parallel_for), with one
grain for most kernels and another for square roots; both must cut it alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

VECTOR = 64
"""Elements: two AVX-512 registers of 16-bit numbers, the most that a kernel takes at once."""
GRAINS = (32768, 2048)
"""Elements below which a kernel uses one thread: at::internal::GRAIN_SIZE, and square roots'."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A piece of a flat parameter: slices of ``lengths`` elements, one after the other."""

    start: int
    lengths: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Return the elements in all slices."""
        return sum(self.lengths)

    @property
    def bounds(self) -> Iterator[tuple[int, int]]:
        """Yield the (begin, end) of each slice, counted from the start of the piece."""
        begin = 0
        for length in self.lengths:
            yield begin, begin + length
            begin += length


def can_partition(numel: int, threads: int) -> bool:
    """Return whether all kernels share ``numel`` elements among threads in the same ranges."""
    return len({_sharers(numel, grain, threads) for grain in GRAINS}) == 1


def partition(numel: int, elements: int, threads: int) -> list[Partition]:
    """Cut ``numel`` elements into pieces of at most ``elements`` (at least VECTOR)."""
    size = _whole_vectors(max(elements, VECTOR), threads)
    sharers = _sharers(numel, GRAINS[0], threads)
    span = -(-numel // sharers)
    # All ranges are whole vectors, so pieces need not begin where ranges do.
    if span % VECTOR == 0:
        span = numel
    pieces: list[Partition] = []
    for begin in range(0, numel, span):
        end = min(begin + span, numel)
        pieces.extend(
            Partition(start, tuple(_slices(min(size, end - start), threads)))
            for start in range(begin, end, size)
        )
    return pieces


def _slices(numel: int, threads: int) -> Iterator[int]:
    """Split ``numel`` so that no thread's share of a slice ends within a vector, but the last."""
    # Below the least grain one thread takes all.
    while numel >= min(GRAINS):
        length = _whole_vectors(numel, threads)
        yield length
        numel -= length
    if numel:
        yield numel


def _whole_vectors(numel: int, threads: int) -> int:
    """Return the most elements, at most ``numel``, that threads share in whole vectors."""
    length = numel
    # The unit follows from the length, so it may be another one for what is left.
    while rest := length % _unit(length, threads):
        length -= rest
    return length


def _unit(numel: int, threads: int) -> int:
    return VECTOR * lcm(*(_sharers(numel, grain, threads) for grain in GRAINS))


def _sharers(numel: int, grain: int, threads: int) -> int:
    return max(1, min(threads, -(-numel // grain)))
