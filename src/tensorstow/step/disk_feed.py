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
"""

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

_AT_ONCE = 2
_AHEAD = 2
"""Units that are read beyond the one that is pinned last."""


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


@dataclass(eq=False, slots=True)
class _Pin:
    pager: Pager
    users: int = 0
    """Chunks in flight that need the pin."""
    changed: bool = False


@dataclass(eq=False, slots=True)
class _PinnedChunk:
    """A chunk in flight whose weights are pinned."""

    part: _DiskChunk
    pagers: frozenset[int]


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
        self._parts_of: dict[int, list[_DiskChunk]] = {}
        self._left: dict[int, int] = {}
        """Number of chunks that are not updated yet, by pager."""
        self._pinned_chunks: list[_PinnedChunk] = []
        self._pins: dict[int, _Pin] = {}

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
        self._gradients.clear()
        self._parts.clear()
        self._parts_of.clear()
        self._left.clear()
        self._pinned_chunks.clear()
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
                self._left[key] = self._left.get(key, 0) + 1
        for update in plan.updates:
            if update.gradient is not None and update.param.number in self._due:
                self.offer(update.param, update.gradient)

    def offer(self, param: ManagedParam, gradient: torch.Tensor) -> None:
        """Take the contiguous gradient of ``param``, and keep it until its weight is new."""
        self._gradients[param.number] = gradient.view(-1)

    def send(self, chunk: int) -> None:
        """Pin the weights of a chunk that awaits no more gradients, and pass its gradients on."""
        if chunk in self._parts:
            self._pin_chunk(self._parts[chunk])

    def move_on(self) -> None:
        """End the pins of chunks that the step is done with."""
        under_way = []
        for pinned in self._pinned_chunks:
            if not self._pipeline.is_updated(pinned.part.chunk.number):
                under_way.append(pinned)
                continue
            for key in pinned.pagers:
                self._pins[key].users -= 1
            for key in self._keys(pinned.part.owners):
                self._left[key] -= 1
        self._pinned_chunks = under_way
        for key, pin in list(self._pins.items()):
            if not pin.users and not self._left[key]:
                self._unpin(key)

    def close(self, sent: Callable[[], None]) -> None:
        """Pass on the rest, chunk by chunk: no more gradients come."""
        numbers = self._pipeline.order_now()
        parts = self._by_pager([self._parts[n] for n in numbers if n in self._parts])
        updated = [self._keys(part.owners & self._gradients.keys()) for part in parts]
        for index, part in enumerate(parts):
            self._pin_chunk(part)
            for pager in updated[index].values():
                following = (p for pagers in updated[index + 1 :] for p in pagers.values())
                pager.expect([*islice(dict.fromkeys(following), _AHEAD)])
        sent()

    def end(self) -> None:
        """End every pin: the step is over."""
        for key in list(self._pins):
            self._unpin(key)

    # --- inside ---

    def _by_pager(self, parts: Sequence[_DiskChunk]) -> Sequence[_DiskChunk]:
        """Return ``parts`` in order, with those of one pager together: it is pinned once."""
        first: dict[int, int] = {}
        ranks = {}
        for index, part in enumerate(parts):
            firsts = [first.setdefault(key, index) for key in self._keys(part.owners)]
            ranks[part] = min(firsts, default=index)
        return sorted(parts, key=lambda part: ranks[part])

    def _pin_chunk(self, part: _DiskChunk) -> None:
        """Pin the weights of a chunk, and pass on its gradients."""
        del self._parts[part.chunk.number]
        pieces: list[tuple[int, torch.Tensor | None]] = []
        changed = set()
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
        needed = self._keys(self._touched(part, changed))
        self._make_room(needed)
        written = self._keys(changed)
        for key, pager in needed.items():
            pin = self._pins.get(key) or self._pin(key, pager)
            pin.users += 1
            pin.changed |= key in written
        self._pinned_chunks.append(_PinnedChunk(part, frozenset(needed)))
        self._pipeline.add_chunk_gradients(part.chunk.number, pieces)

    def _touched(self, part: _DiskChunk, changed: set[int]) -> Collection[int]:
        """Return the parameters whose weights are read or written with the chunk."""
        if not self._captures:
            return changed
        is_updated = part.crosses or self._gate.has_gradient(part.chunk.number)
        if is_updated or not self._pipeline.stored.captured(part.chunk):
            return part.owners
        return ()

    def _make_room(self, needed: Mapping[int, Pager]) -> None:
        """End other pins until there is memory for the ``needed`` ones."""
        self.move_on()
        while not self._is_room_for(needed):
            free = (k for k, pin in self._pins.items() if k not in needed and not pin.users)
            key = next(free, None)
            if key is not None:
                self._unpin(key)
                continue
            # A chunk that awaits a copy from a device may take as long as the step.
            candidates = (
                g for g in self._pinned_chunks if g.pagers - needed.keys() and not g.part.crosses
            )
            oldest = next(candidates, None)
            if oldest is None:
                return
            self._pipeline.wait_chunk(oldest.part.chunk.number)
            self.move_on()

    def _is_room_for(self, needed: Mapping[int, Pager]) -> bool:
        missing = [pager for key, pager in needed.items() if key not in self._pins]
        if not missing:
            return len(self._pins) <= max(_AT_ONCE, len(needed))
        few = len(self._pins) + len(missing) <= max(_AT_ONCE, len(needed))
        return few and missing[0].can_pin(sum(pager.nbytes for pager in missing))

    def _pin(self, key: int, pager: Pager) -> _Pin:
        pager.pin(for_write=bool(self._due))
        pin = self._pins[key] = _Pin(pager)
        return pin

    def _unpin(self, key: int) -> None:
        pin = self._pins.pop(key)
        pin.pager.unpin(dirty=pin.changed)

    def _keys(self, numbers: Iterable[int]) -> dict[int, Pager]:
        pagers = (self._pagers[n] for n in numbers if n in self._pagers)
        return {id(pager): pager for pager in pagers}
