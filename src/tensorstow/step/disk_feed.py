"""Pins weights on disk in memory while a step updates them or a commit reads them.

[Note: Pins] A step with such weights is an open one under every schedule. The pipeline reads and
writes the weights of a chunk only while it works on that chunk, which it does when it has all of
the chunk's gradients. So the feed keeps gradients until the chunk is complete; then it pins the
chunk's weights and passes the gradients to the pipeline. When the step closes, it passes on the
remaining chunks in the same way: a commit writes weights of chunks without a gradient too.

A unit's pin ends when no more of its chunks are to come. If others need memory it ends when no
chunk in flight needs it, and is taken again later, so a parameter without a gradient holds no
memory. At most two units are pinned at once, fewer if memory is short, or as many as one chunk has
parts of: states are cut so that this is one, unless they were cut for another plan and resumed.

[Note: Pins beside a forward] With ``overlap="forward"`` it passes on what is read already and has
room, and returns. A wait for a weight passes on the chunks up to it; ``move_on`` has those follow
that can without waiting. So one unit is updated while the one before it computes, and a forward
finds each weight in memory, where the update has left it. Each wait leaves room for one unit more,
which the forward pins; so the pins of both stay within the memory of three units.

[Note: Old weights] In a step that may be undone the old weights stay on disk, and the new ones go
to a second place. A chunk whose states are in memory is passed on after ``confirm``: it would wait
for that with its unit pinned, and others need the room.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from tensorstow.base.tiers import Tier
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import Segment
from tensorstow.states.native_pipeline import UpdatePipeline
from tensorstow.step.chunk_gate import ChunkGate
from tensorstow.step.gradient_feed import GradientFeed
from tensorstow.step.managed_param import ManagedParam, StepPlan
from tensorstow.tensors.dtensor import Pager

Pagers = Mapping[int, Pager]
"""The buffers of units, by ``id``."""
_AT_ONCE = 2
_AHEAD = 2
"""Units that are read beyond the one that is pinned last."""


@dataclass(eq=False, slots=True)
class _Pin:
    pager: Pager
    users: int = 0
    """Chunks in flight that need the pin."""
    changed: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class _PinnedChunk:
    """A chunk in flight whose weights are pinned."""

    number: int
    pagers: frozenset[int]
    """The units that it needs."""
    of: frozenset[int]
    """The units that it has a part of."""
    crosses: bool


class UnitPins:
    """Pins of units, by the chunks in flight that need them."""

    def __init__(self, pipeline: UpdatePipeline) -> None:
        """``pipeline`` says which chunks are updated."""
        self._pipeline = pipeline
        self._left: dict[int, int] = {}
        """Number of chunks that are not updated yet, by pager."""
        self._chunks: list[_PinnedChunk] = []
        self._pins: dict[int, _Pin] = {}

    def begin(self, left: Mapping[int, int]) -> None:
        """Begin a step in which each unit has so many chunks to be passed on."""
        self._left = dict(left)
        self._chunks.clear()

    def add(self, chunk: int, needed: Pagers, of: Pagers, *, crosses: bool, write: bool) -> None:
        """Pin the units that a chunk needs, until it is updated; wait until there is room.

        Args:
            chunk: The number of a chunk that is passed on now.
            needed: The units of the weights that are read or written with it.
            of: All units that it has a part of.
            crosses: Whether its gradients come from a device, which may take as long as the step.
            write: Whether the step updates weights.
        """
        self._make_room(needed)
        for key, pager in needed.items():
            if key not in self._pins:
                pager.pin(for_write=write)
                self._pins[key] = _Pin(pager)
            self._pins[key].users += 1
        self._chunks.append(_PinnedChunk(chunk, frozenset(needed), frozenset(of), crosses))

    def mark_changed(self, units: Pagers) -> None:
        """Have pinned units written back when their pins end."""
        for key in units:
            self._pins[key].changed = True

    def end_done(self) -> None:
        """End the pins of chunks that the step is done with."""
        under_way = []
        for chunk in self._chunks:
            if not self._pipeline.is_updated(chunk.number):
                under_way.append(chunk)
                continue
            for key in chunk.pagers:
                self._pins[key].users -= 1
            for key in chunk.of:
                self._left[key] -= 1
        self._chunks = under_way
        for key, pin in list(self._pins.items()):
            if not pin.users and not self._left[key]:
                self._unpin(key)

    def are_free(self, needed: Pagers) -> bool:
        """Return whether these can be pinned without waiting for a read, or for other pins."""
        missing = [pager for key, pager in needed.items() if key not in self._pins]
        return all(pager.is_ready() for pager in missing) and self._is_room_for(needed)

    def leave_room(self) -> None:
        """Have room for the largest unit: what computes pins its own next."""
        self.end_done()
        # ``can_pin`` keeps room for the largest buffer by itself, so 0 asks for that alone.
        while self._pins and not next(iter(self._pins.values())).pager.can_pin(0):
            if not self._end_one(()):
                return

    def end(self, *, is_undone: bool = False) -> None:
        """End every pin: the step is over. What an undone step has changed is not written."""
        self._chunks.clear()
        for key in list(self._pins):
            self._pins[key].changed &= not is_undone
            self._unpin(key)

    # --- inside ---

    def _make_room(self, needed: Pagers) -> None:
        """End other pins until there is memory for the ``needed`` ones."""
        self.end_done()
        while not self._is_room_for(needed):
            if not self._end_one(needed.keys()):
                return

    def _end_one(self, needed: Collection[int]) -> bool:
        """End a pin that no chunk in flight needs, or wait for the oldest chunk; False: neither.

        Pins of ``needed`` stay. A chunk that awaits a copy from a device may take as long as the
        step: it is left out.
        """
        free = (k for k, pin in self._pins.items() if k not in needed and not pin.users)
        key = next(free, None)
        if key is not None:
            self._unpin(key)
            return True
        chunks = (c for c in self._chunks if c.pagers.difference(needed) and not c.crosses)
        oldest = next(chunks, None)
        if oldest is None:
            return False
        self._pipeline.wait_chunk(oldest.number)
        self.end_done()
        return True

    def _is_room_for(self, needed: Pagers) -> bool:
        missing = [pager for key, pager in needed.items() if key not in self._pins]
        if not missing:
            return len(self._pins) <= max(_AT_ONCE, len(needed))
        few = len(self._pins) + len(missing) <= max(_AT_ONCE, len(needed))
        return few and missing[0].can_pin(sum(pager.nbytes for pager in missing))

    def _unpin(self, key: int) -> None:
        pin = self._pins.pop(key)
        pin.pager.unpin(dirty=pin.changed)


@dataclass(eq=False, slots=True)
class _DiskChunk:
    """A chunk with weights on disk: its segments and their owners."""

    chunk: Chunk
    runs: tuple[Segment, ...]
    """Segments of parameters whose gradients this feed passes on."""
    owners: frozenset[int]
    """Its parameters on disk."""
    crosses: bool
    """Some of its gradients come from a device."""


class DiskFeed(GradientFeed):
    """Gradients of weights on disk, and the pins of the step that is open."""

    def __init__(
        self, pipeline: UpdatePipeline, chunks: Sequence[Chunk], params: Sequence[ManagedParam]
    ) -> None:
        """Feed ``pipeline``; ``params``: all of the optimizer's, by number."""
        super().__init__(pipeline)
        self._pagers = {p.number: p.pager for p in params if p.pager is not None}
        self._chunks = [c for c in chunks if not self._pagers.keys().isdisjoint(c.owners)]
        self._on_device = frozenset(p.number for p in params if p.tier is Tier.DEVICE)
        self._gate = ChunkGate(())
        self._captures = False
        self._due: frozenset[int] = frozenset()
        self._gradients: dict[int, torch.Tensor] = {}
        """Gradients with chunks that were not passed on; after that the pipeline holds them."""
        self._parts: dict[int, _DiskChunk] = {}
        """Chunks that were not passed on yet."""
        self._rest: deque[_DiskChunk] = deque()
        """The same of a closed step, in the order in which they are passed on."""
        self._sent: Callable[[], None] | None = None
        """Called when a closed step has no more chunks to pass on."""
        self._parts_of: dict[int, list[_DiskChunk]] = {}
        self._pins = UnitPins(pipeline)
        self._kept: dict[int, Pager] = {}
        """The units whose old weights are kept ([Note: Old weights])."""
        self._changed: dict[int, Pager] = {}
        """Those of them that updates have changed."""

    # --- a step ---

    def prepare(self, plan: StepPlan) -> None:
        """Mark weights that a commit reads without an update as expected."""
        rows = plan.rows
        self._due = frozenset(n for n in self._pagers if rows[n].expected)
        self._captures = plan.commits
        if self._captures:
            for number in self._pagers.keys() - self._due:
                rows[number] = rows[number]._replace(expected=True)

    def begin(self, plan: StepPlan, gate: ChunkGate) -> None:
        """Begin a step by ``plan``, with the gradients that it has."""
        self._gate = gate
        self._rest.clear()
        self._sent = None
        self._gradients.clear()
        self._parts.clear()
        self._parts_of.clear()
        left: dict[int, int] = {}
        expected = self._pagers.keys() if self._captures else self._due
        for chunk in self._chunks:
            runs = tuple(run for run in chunk.plan.runs if run.parameter in expected)
            if not runs:
                continue
            owners = frozenset(chunk.owners)
            crosses = not owners.isdisjoint(self._on_device)
            part = _DiskChunk(chunk, runs, owners & self._pagers.keys(), crosses)
            self._parts[chunk.number] = part
            for run in runs:
                self._parts_of.setdefault(run.parameter, []).append(part)
            for key in self._keys(part.owners):
                left[key] = left.get(key, 0) + 1
        self._pins.begin(left)
        self._changed.clear()
        self._kept = self._keys(self._due) if self.undoable else {}
        for pager in self._kept.values():
            pager.keep()
        for update in plan.updates:
            if update.gradient is not None and update.param.number in self._due:
                self.offer(update.param, update.gradient)

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take the contiguous gradient of ``param``, and keep it until its weight is new."""
        self._gradients[param.number] = gradient.view(-1)

    def send(self, chunk: int) -> None:
        """Pin the weights of a chunk that awaits no more gradients, and pass its gradients on."""
        part = self._parts.get(chunk)
        if part is None or (self.undoable and part.chunk.resident):
            return  # it has no weights on disk, or waits for ``confirm``
        self._pin_chunk(part)

    def move_on(self) -> None:
        """End the pins of chunks that the step is done with; pass on those that need no wait."""
        self._pins.end_done()
        while self._rest and self._pins.are_free(self._needed(self._rest[0])):
            self._send_next()

    def close(self, sent: Callable[[], None], *, waits: bool = True) -> None:
        """Pass on the rest, chunk by chunk: no more gradients come."""
        numbers = self._pipeline.order_now()
        parts = [self._parts[n] for n in numbers if n in self._parts]
        self._rest.extend(self._by_pager(parts))
        if not self._rest:
            sent()
            return
        self._sent = sent
        if waits:
            self.wait(None)
            return
        self._send_next()  # the next forward begins with it
        self.move_on()

    def wait(self, numbers: Collection[int] | None) -> None:
        """Pass on the rest up to the last chunk of these parameters, or all."""
        due = set(self._rest)
        if numbers is not None:
            due &= {part for number in numbers for part in self._parts_of.get(number, ())}
        while due:
            due.discard(self._send_next())
        self._pins.leave_room()

    def end(self) -> None:
        """End every pin: the step is over."""
        self._rest.clear()
        self._pins.end()

    def confirm(self) -> None:
        """Give the old weights up."""
        super().confirm()
        for pager in self._kept.values():
            pager.confirm()
        self._kept = {}

    def abort(self) -> None:
        """Free the memory of the step, and give the old weights up: its weights are lost."""
        super().abort()
        self.confirm()

    def undo(self) -> None:
        """End every pin, and put the old weights back."""
        self._rest.clear()
        self._gradients.clear()
        self._pins.end(is_undone=True)
        for key, pager in self._kept.items():
            if key in self._changed:
                pager.put_back()
            else:
                pager.confirm()
        self._kept = {}

    # --- inside ---

    def _by_pager(self, parts: Sequence[_DiskChunk]) -> Sequence[_DiskChunk]:
        """Return ``parts`` in order, with those of one pager together: it is pinned once."""
        first: dict[int, int] = {}
        ranks = {}
        for index, part in enumerate(parts):
            firsts = [first.setdefault(key, index) for key in self._keys(part.owners)]
            ranks[part] = min(firsts, default=index)
        return sorted(parts, key=lambda part: ranks[part])

    def _send_next(self) -> _DiskChunk:
        """Pass on the next chunk of a closed step, and have the units after it read; return it."""
        part = self._rest.popleft()
        # Before the pin: that drops gradients, by which ``_updated`` finds the weights.
        pagers = self._keys(self._updated(part)).values()
        self._pin_chunk(part)
        for pager in pagers:
            following = (p for rest in self._rest for p in self._keys(self._updated(rest)).values())
            pager.expect([*islice(dict.fromkeys(following), _AHEAD)])
        if not self._rest and self._sent is not None:
            sent, self._sent = self._sent, None
            sent()
        return part

    def _updated(self, part: _DiskChunk) -> Collection[int]:
        """Return the parameters on disk that the update of a chunk changes."""
        return part.owners & self._gradients.keys()

    def _pin_chunk(self, part: _DiskChunk) -> None:
        """Pin the weights of a chunk, and pass on its gradients."""
        del self._parts[part.chunk.number]
        pieces: list[tuple[int, torch.Tensor | None]] = []
        # Before the loop drops gradients, by which ``_needed`` finds the weights.
        needed, changed = self._needed(part), set()
        for run in part.runs:
            gradient = self._gradients.get(run.parameter)
            if gradient is None:
                pieces.append((run.parameter, None))  # a commit reads the weight without an update
                continue
            changed.add(run.parameter)
            pieces.append((run.parameter, gradient[run.start : run.start + run.count]))
            self._parts_of[run.parameter].remove(part)
            if not self._parts_of[run.parameter]:
                del self._gradients[run.parameter]
        of, write = self._keys(part.owners), bool(self._due)
        # The pipeline may use the weights as soon as it has the gradients: pins come first.
        self._pins.add(part.chunk.number, needed, of, crosses=part.crosses, write=write)
        self._pins.mark_changed(self._keys(changed))
        self._changed |= self._keys(changed)
        self._pipeline.add_chunk_gradients(part.chunk.number, pieces)

    def _needed(self, part: _DiskChunk) -> dict[int, Pager]:
        """Return the units whose weights are read or written with the chunk."""
        if not self._captures:
            return self._keys(self._updated(part))
        is_updated = part.crosses or self._gate.has_gradient(part.chunk.number)
        # A commit reads the weights of a chunk unless the chunk's place has the current ones.
        is_read = is_updated or not self._pipeline.stored.captured(part.chunk)
        return self._keys(part.owners if is_read else ())

    def _keys(self, numbers: Iterable[int]) -> dict[int, Pager]:
        pagers = (self._pagers[n] for n in numbers if n in self._pagers)
        return {id(pager): pager for pager in pagers}
