"""Buffers for units that are used in turn: of idle ones, the one that is needed last goes first."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from tensorstow.base.errors import BudgetError
from tensorstow.base.sizes import format_bytes
from tensorstow.memory.bounded_bytes import BoundedBytes
from tensorstow.memory.use_order import in_order_of_leaving


class HasBytes(Protocol):
    """A unit: it can be a key."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def nbytes(self) -> int: ...  # noqa: D102
    @property
    def users(self) -> int: ...  # noqa: D102


U = TypeVar("U", bound=HasBytes)
B = TypeVar("B")


class UnitBuffers(Generic[U, B]):
    """Buffers of the sizes of units, and a bound on the bytes of all of them."""

    def __init__(
        self,
        capacity: int,
        allocate: Callable[[int], B],
        settle: Callable[[U, B], object],
        upcoming: Callable[[], Iterator[U]],
    ) -> None:
        """Hold up to ``capacity`` bytes in buffers that ``allocate`` makes.

        ``settle`` is called before a unit loses its buffer: it waits for what still uses that.
        ``upcoming`` returns the units in the order of their next use, for one pass.
        """
        self.memory = BoundedBytes(capacity)
        """All buffers, those of units and free ones."""
        self._used = BoundedBytes(capacity)
        """The bytes of units that have buffers."""
        self._allocate = allocate
        self._settle = settle
        self._upcoming = upcoming
        self._of: dict[U, B] = {}
        self._free: list[tuple[int, B]] = []

    @property
    def buffers(self) -> list[B]:
        """Return all buffers, those of units and free ones."""
        return [*self._of.values(), *(buffer for _, buffer in self._free)]

    def get(self, unit: U) -> B | None:
        """Return the buffer of a unit; None: it has none."""
        return self._of.get(unit)

    def take(self, unit: U, keep: Iterable[U] | None) -> B | None:
        """Return a buffer for a unit that has none; idle units may lose theirs for it.

        Units in ``keep`` keep theirs, and None is returned if that leaves no room. If ``keep`` is
        None, the unit must get one: raises BudgetError if units in use leave no room.
        """
        for leaving in self.leaving_for(unit, keep or ()):
            self.drop(leaving)
        if not self._used.fits(unit.nbytes):
            if keep is None:
                raise self._no_room(unit)
            return None
        buffer = self._free_buffer(unit.nbytes)
        self._of[unit] = buffer
        self._used.take(unit.nbytes)
        return buffer

    def leaving_for(self, unit: U, keep: Iterable[U] = ()) -> list[U]:
        """Return the idle units that leave for a unit, the farthest next use first.

        None of ``keep`` leaves. All others do if they do not make room enough.
        """
        exempt, needed, leaving = set(keep), self._used.held + unit.nbytes, list[U]()
        idle = [other for other in self._of if not other.users and other not in exempt]
        for other in in_order_of_leaving(idle, self._upcoming()):
            if needed <= self._used.capacity:
                break
            leaving.append(other)
            needed -= other.nbytes
        return leaving

    def drop(self, unit: U) -> None:
        """Free a unit's buffer for others; raises what ``settle`` raises."""
        buffer = self._of.pop(unit, None)
        if buffer is None:
            return
        self._used.give(unit.nbytes)
        try:
            self._settle(unit, buffer)
        finally:
            # After an error too: ``memory`` counts the buffer until it is given back.
            self._free.append((unit.nbytes, buffer))

    def _free_buffer(self, nbytes: int) -> B:
        """Return a free buffer of this size, or a new one in place of free ones of other sizes."""
        for index, (size, buffer) in enumerate(self._free):
            if size == nbytes:
                del self._free[index]
                return buffer
        while self._free and not self.memory.fits(nbytes):
            self.memory.give(self._free.pop(0)[0])
        buffer = self._allocate(nbytes)
        self.memory.take(nbytes)
        return buffer

    def _no_room(self, unit: U) -> BudgetError:
        used = sum(u.nbytes for u in self._of if u.users)
        capacity = format_bytes(self.memory.capacity)
        return BudgetError(
            f"Unit {unit.name!r} ({format_bytes(unit.nbytes)}) is used while others"
            f" ({format_bytes(used)}) are, and buffers have {capacity}: set"
            " Plan(weight_ram_budget=) to more, if several threads compute with the model."
        )
