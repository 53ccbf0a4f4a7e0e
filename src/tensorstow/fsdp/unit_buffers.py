"""Buffers for units that are used in turn: of idle ones, the one that is needed last goes first."""

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from tensorstow.base.errors import BudgetError
from tensorstow.base.sizes import format_bytes


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
        """Hold up to ``capacity`` bytes.

        Args:
            capacity: The bytes of all buffers.
            allocate: Returns a buffer of so many bytes.
            settle: Called before a unit loses its buffer: waits for what still uses that.
            upcoming: Returns the units in the order of their next use, for one pass.
        """
        self.capacity = capacity
        self.held_bytes = 0
        self.high_water_bytes = 0
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
        """Return a buffer for a unit, for which idle ones may lose theirs.

        Args:
            unit: The unit, which has none.
            keep: Units that keep theirs; where there is no room then, None is returned. None: the
                unit has to have one, at the cost of every idle unit.

        Raises:
            BudgetError: It has to have one, and units in use leave no room.
        """
        while sum(u.nbytes for u in self._of) + unit.nbytes > self.capacity:
            last = self._farthest(set(keep or ()))
            if last is None and keep is None:
                raise self._no_room(unit)
            if last is None:
                return None
            self.drop(last)
        buffer = self._free_buffer(unit.nbytes)
        self._of[unit] = buffer
        return buffer

    def drop(self, unit: U) -> None:
        """Free a unit's buffer for others; raises what ``settle`` raises."""
        buffer = self._of.pop(unit, None)
        if buffer is None:
            return
        try:
            self._settle(unit, buffer)
        finally:
            self._free.append((unit.nbytes, buffer))

    def _farthest(self, keep: Collection[U]) -> U | None:
        """Return the idle unit that is not to be kept and whose next use is last."""
        idle = {u for u in self._of if not u.users and u not in keep}
        farthest = None
        for unit in self._upcoming():
            if unit in idle:
                idle.remove(unit)
                farthest = unit
        return next(iter(idle), farthest)  # one that is not used at all, if there is any

    def _free_buffer(self, nbytes: int) -> B:
        """Return a free buffer of this size, or a new one in place of free ones of other sizes."""
        for index, (size, buffer) in enumerate(self._free):
            if size == nbytes:
                del self._free[index]
                return buffer
        while self._free and self.held_bytes + nbytes > self.capacity:
            self.held_bytes -= self._free.pop(0)[0]
        buffer = self._allocate(nbytes)
        self.held_bytes += nbytes
        self.high_water_bytes = max(self.high_water_bytes, self.held_bytes)
        return buffer

    def _no_room(self, unit: U) -> BudgetError:
        used = sum(u.nbytes for u in self._of if u.users)
        return BudgetError(
            f"Unit {unit.name!r} ({format_bytes(unit.nbytes)}) is used while others"
            f" ({format_bytes(used)}) are, and buffers have {format_bytes(self.capacity)}: set"
            " Plan(buffer_pool_bytes=) to more, if several threads compute with the model."
        )
