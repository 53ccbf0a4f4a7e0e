"""Weights that are on disk: lent memory while a step updates them, or a commit reads them.

[Note: Leases] A step that touches such weights is an open one, whatever the schedule. The pipeline
touches the weights of a chunk only while it works on that chunk, and it does so when it has all
that the chunk waits for. So gradients are kept here until all of a chunk's are there; then whoever
lends its weights memory is asked for it, and the pipeline gets them. What a chunk is not to get is
said at the step's end, in the same way: a commit takes weights out of chunks without a gradient.

A lease ends when nothing more of its buffer is to come. Where others need the room it ends when no
chunk under way needs it, and is taken again later: a parameter that gets no gradient keeps nobody's
memory. So at most two buffers lend at once, fewer where there is no room for that, or as many as
one chunk has parts of: states are cut so that this is one, unless they were cut for another plan
and resumed.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tensorstow.base.errors import OptionError
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import Segment
from tensorstow.states.native_pipeline import StepRow, UpdatePipeline
from tensorstow.step.param_table import ManagedParam, ParamTable
from tensorstow.tensors.dtensor import Pager

_AT_ONCE = 2


@dataclass(eq=False, slots=True)
class _Part:
    """What a step does with one chunk through us."""

    chunk: Chunk
    runs: tuple[Segment, ...]
    """Those whose gradients we hand over."""
    owners: frozenset[int]
    """The parameters on disk in it."""
    awaited: int
    """Gradients that may still come."""
    given: bool
    """The pipeline has had gradients of it since the step began."""
    carried: bool
    """Others hand over gradients of it."""


@dataclass(eq=False, slots=True)
class _Pin:
    pager: Pager
    users: int = 0
    """Chunks that were handed over under it and are not updated yet."""
    changed: bool = False


@dataclass(eq=False, slots=True)
class _Granted:
    part: _Part
    pagers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Numbers:
    """Who is who in a step, by numbers of parameters."""

    due: Collection[int]
    """Their gradients may come, and we are given them."""
    bystanders: Collection[int] = ()
    """The step waits for our word on them, and they get none."""
    given: Collection[int] = ()
    """The pipeline had their gradients when the step began."""


def lend(params: ParamTable, rows: list[StepRow], *, captures: bool) -> "DiskFeed | None":
    """Return the leases of the step by ``rows``; None where it touches no weight on disk.

    ``captures``: it commits, so it may read weights that it does not update. Their ``rows`` are
    changed: the step waits for our word on them.
    """
    managed = params.all()
    due = {n for n, row in enumerate(rows) if row.expected and managed[n].host_weight is None}
    lent = {m.number for m in managed if m.pager is not None}
    if not (lent if captures else lent & due):
        return None
    bystanders = lent - due if captures else set()
    for number in bystanders:
        rows[number] = replace(rows[number], expected=True)
    given = {n for n, row in enumerate(rows) if row.gradient is not None}
    numbers = Numbers(due, bystanders, given)
    return DiskFeed(params.store.pipeline, params.store.chunks, managed, numbers, captures=captures)


class DiskFeed:
    """The leases of one step that is open."""

    def __init__(
        self,
        pipeline: UpdatePipeline,
        chunks: Iterable[Chunk],
        managed: Sequence[ManagedParam],
        numbers: Numbers,
        *,
        captures: bool = False,
    ) -> None:
        """Begin with none; ``captures``: the step commits."""
        self._pipeline = pipeline
        self._captures = captures
        self._due = frozenset(numbers.due)
        self._pagers = {m.number: m.pager for m in managed if m.pager is not None}
        self._gradients: dict[int, torch.Tensor] = {}
        """Until the last of their chunks has been handed over: the pipeline holds them then."""
        self._parts: dict[int, _Part] = {}
        """Chunks that were not handed over yet."""
        self._parts_of: dict[int, list[_Part]] = {}
        self._left: dict[int, int] = {}
        """By buffer: chunks that are not updated yet."""
        self._granted: list[_Granted] = []
        self._pins: dict[int, _Pin] = {}
        expected = self._due.union(numbers.bystanders)
        given = frozenset(numbers.given)
        carried = frozenset(m.number for m in managed if m.host_weight is not None)
        for chunk in chunks:
            owners = frozenset(chunk.owners)
            runs = tuple(run for run in chunk.plan.runs if run.parameter in expected)
            if not runs:
                continue
            part = _Part(
                chunk,
                runs,
                owners & self._pagers.keys(),
                len(owners & self._due),
                given=not owners.isdisjoint(given),
                carried=not owners.isdisjoint(carried),
            )
            self._parts[chunk.number] = part
            for run in runs:
                self._parts_of.setdefault(run.parameter, []).append(part)
            for key in self._keys(part.owners):
                self._left[key] = self._left.get(key, 0) + 1

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take the contiguous gradient of ``param``, which stays until its weight is new.

        Raises OptionError for a parameter that is not due.
        """
        if param.number not in self._due:
            message = (
                "A parameter got a gradient and was frozen when the step began: unfreeze it before"
                " backward."
            )
            raise OptionError(message)
        self._gradients[param.number] = gradient.view(-1)

    def land(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take a gradient as ``offer`` does, and hand over what needs no other one."""
        self.offer(param, gradient)
        for part in list(self._parts_of.get(param.number, [])):
            part.awaited -= 1
            if part.awaited == 0:
                self._grant(part)
        self._end_updated()

    def close(self) -> None:
        """Hand over the rest, chunk by chunk: no more gradients come."""
        numbers = self._pipeline.order_now()
        for part in self._by_pager([self._parts[n] for n in numbers if n in self._parts]):
            self._grant(part)

    def end_all(self) -> None:
        """End every lease, when the step is over."""
        for key in list(self._pins):
            self._end(key)

    # --- inside ---

    def _by_pager(self, parts: Sequence[_Part]) -> Sequence[_Part]:
        """Return ``parts`` in their order, but those of one buffer together: it is pinned once."""
        first: dict[int, int] = {}
        ranks = {}
        for index, part in enumerate(parts):
            found = [first.setdefault(key, index) for key in self._keys(part.owners)]
            ranks[part] = min(found, default=index)
        return sorted(parts, key=lambda part: ranks[part])

    def _grant(self, part: _Part) -> None:
        """Let the weights of a chunk be in memory, and hand over what it waits for."""
        del self._parts[part.chunk.number]
        landing: list[tuple[int, torch.Tensor | None]] = []
        changed = set()
        for run in part.runs:
            gradient = self._gradients.get(run.parameter)
            if gradient is None:
                landing.append((run.parameter, None))
                continue
            changed.add(run.parameter)
            landing.append((run.parameter, gradient[run.start : run.start + run.count]))
            self._parts_of[run.parameter].remove(part)
            if not self._parts_of[run.parameter]:
                del self._gradients[run.parameter]
        needed = self._keys(self._touched(part, changed))
        self._make_room(needed)
        written = self._keys(changed)
        for key, pager in needed.items():
            pin = self._pins.get(key) or self._take(key, pager)
            pin.users += 1
            pin.changed |= key in written
        if part.owners:
            self._granted.append(_Granted(part, frozenset(needed)))
        self._pipeline.land_pieces(part.chunk.number, landing)

    def _touched(self, part: _Part, changed: set[int]) -> Collection[int]:
        """Return the parameters whose weights are read or written with the chunk."""
        if not self._captures:
            return changed
        if changed or part.given or part.carried or not self._pipeline.captured(part.chunk):
            return part.owners
        return ()

    def _make_room(self, needed: Mapping[int, Pager]) -> None:
        """End others' leases until there is room for those that are ``needed``."""
        self._end_updated()
        while not self._is_room_for(needed):
            free = (k for k, pin in self._pins.items() if k not in needed and not pin.users)
            key = next(free, None)
            if key is not None:
                self._end(key)
                continue
            # What waits for a gradient that somebody else hands over may take as long as the step.
            others = (g for g in self._granted if g.pagers - needed.keys() and not g.part.carried)
            first = next(others, None)
            if first is None:
                return
            self._pipeline.wait_chunk(first.part.chunk.number)
            self._end_updated()

    def _is_room_for(self, needed: Mapping[int, Pager]) -> bool:
        missing = [pager for key, pager in needed.items() if key not in self._pins]
        if not missing:
            return len(self._pins) <= max(_AT_ONCE, len(needed))
        few = len(self._pins) + len(missing) <= max(_AT_ONCE, len(needed))
        return few and missing[0].can_pin(sum(pager.nbytes for pager in missing))

    def _take(self, key: int, pager: Pager) -> _Pin:
        pager.pin(for_write=bool(self._due))
        pin = self._pins[key] = _Pin(pager)
        return pin

    def _end_updated(self) -> None:
        """Go on from the chunks that the step is done with."""
        under_way = []
        for granted in self._granted:
            if not self._pipeline.is_updated(granted.part.chunk.number):
                under_way.append(granted)
                continue
            for key in granted.pagers:
                self._pins[key].users -= 1
            for key in self._keys(granted.part.owners):
                self._left[key] -= 1
        self._granted = under_way
        for key, pin in list(self._pins.items()):
            if not pin.users and not self._left[key]:
                self._end(key)

    def _keys(self, numbers: Iterable[int]) -> dict[int, Pager]:
        found = (self._pagers[n] for n in numbers if n in self._pagers)
        return {id(pager): pager for pager in found}

    def _end(self, key: int) -> None:
        pin = self._pins.pop(key)
        pin.pager.unpin(dirty=pin.changed)
