"""The order in which chunks are updated: by when their parameters are used."""

from collections.abc import Callable, Iterable, Sequence

from tensorstow.states.chunks import Chunk


def by_first(chunks: Sequence[Chunk], parameters: Sequence[int]) -> list[int]:
    """Return chunk numbers by the first of their parameters in ``parameters``.

    What the next forward needs first is updated first. Parameters that are not in ``parameters``
    come last, in the order of their numbers.
    """
    return _by(min, chunks, parameters)


def by_last(chunks: Sequence[Chunk], parameters: Sequence[int]) -> list[int]:
    """Return chunk numbers by the last of their parameters in ``parameters``.

    A chunk is updated when the last of its gradients is final.
    """
    return _by(max, chunks, parameters)


def _by(
    pick: Callable[[Iterable[int]], int], chunks: Sequence[Chunk], parameters: Sequence[int]
) -> list[int]:
    rank = {number: index for index, number in enumerate(parameters)}
    keys = {c.number: pick(rank.get(p, len(rank) + p) for p in c.owners) for c in chunks}
    return sorted(keys, key=lambda number: (keys[number], number))
