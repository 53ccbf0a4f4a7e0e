"""Choice of the units of a read-only model that stay in memory; each pass reads the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tensorstow.base.errors import BudgetError
from tensorstow.base.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """The bytes of one unit."""

    resident: int
    """Bytes in memory if the unit stays."""
    passing: int
    """Bytes in a buffer while the unit is used, if it does not stay."""
    around: int = 0
    """Bytes in buffers of the units that contain it."""


def passing_bytes(units: Sequence[UnitBytes], prefetch: int) -> int:
    """Return the host memory for buffers of units that are read in each pass.

    ``units``: in order of use, the first after the last; ``prefetch``: how many are read ahead.
    """
    count, ahead = len(units), min(prefetch, len(units) - 1)
    if not units:
        return 0
    windows = (sum(units[(i + j) % count].passing for j in range(ahead + 1)) for i in range(count))
    return max(windows) + max(unit.around for unit in units)


def choose_resident(
    units: Mapping[str, UnitBytes], limit: int, prefetch: int
) -> tuple[set[str], int]:
    """Return the names of the units that stay in memory, and how many others are read ahead.

    Each byte that stays saves reading a byte in each pass, whichever unit it is in. The largest
    units that fit come first, because the buffers must hold the largest unit that does not stay.
    Among units of one size, those that stay are spread over the pass: while one of them is used,
    the next unit is read.

    Args:
        units: All units, by name, in the order of their use.
        limit: The memory for units that stay and for buffers, in bytes.
        prefetch: How many units to read ahead, if there is room.

    Raises:
        BudgetError: The limit has no room for the buffers.
    """
    names = list(units)
    if sum(unit.resident for unit in units.values()) <= limit:
        return set(names), prefetch
    ahead = next((n for n in range(prefetch, -1, -1) if _bytes(units, set(), n) <= limit), None)
    if ahead is None:
        least = _bytes(units, set(), 0)
        message = (
            f"The memory for weights that are read as they are used is {format_bytes(limit)}, and"
            f" the largest unit has {format_bytes(least)}: allow at least that, or name smaller"
            " units by units=."
        )
        raise BudgetError(message)
    chosen: set[str] = set()
    for size in sorted({unit.resident for unit in units.values()}, reverse=True):
        alike = [name for name in names if units[name].resident == size]
        for count in range(len(alike), 0, -1):
            # In the middle of each of ``count`` equal parts.
            more = chosen | {alike[(2 * i + 1) * len(alike) // (2 * count)] for i in range(count)}
            if _bytes(units, more, ahead) <= limit:
                chosen = more
                break
    return chosen, ahead


def _bytes(units: Mapping[str, UnitBytes], resident: set[str], prefetch: int) -> int:
    stay = sum(units[name].resident for name in resident)
    passing = [unit for name, unit in units.items() if name not in resident]
    return stay + passing_bytes(passing, prefetch)
