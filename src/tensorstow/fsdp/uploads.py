"""Uploads: shards in host memory go up to the accelerator before FSDP2 gathers them.

[Note: Uploads] FSDP2 asks for a unit's shards one after the other, in the stream that gathers, and
over one rank when it is about to compute with them. So they are copied on a stream of our own, unit
by unit, into buffers on the device that are made once: the unit that is asked for now, and those
that come next by pairs of units, as in ``shard_storage``. Streams wait
for each other and the host for none: a buffer is filled again behind the gather that read it.

    idle -> rising (a copy up) -> lent (FSDP2 copies from it) -> idle
                               -> rising again without a copy, where the same unit comes next

Bytes that a copy can read by itself, pinned ones in the dtype that is computed in, are read where
they are. Others (in a pool's buffer, pageable, to be cast) pass through a pinned buffer beside the
device's, so that a buffer's memory is given back at once.

[Note: Old weights] What is uploaded must be the newest weight, and host memory must not change
under a copy. Before a step, a resume or a write to a parameter, uploads are waited for and
forgotten. Beside backward a weight is updated when its gradient is final, so what was gathered in a
backward is not uploaded ahead again in it. Under overlap="forward" a weight is uploaded ahead only
when somebody has waited for its update.

FSDP2 gathers in the device's thread during backward, and of a backward that has raised it may do so
while the caller is in the next call already ([Note: Hooks] in step/calls.py). So whatever looks at
uploads or changes them takes its turn with the calls of the optimizer: such a gather comes before
``resume()`` or behind it. It may come between a step's hooks and its call too, or beside a write to
a parameter: what was uploaded is forgotten before weights change and once more behind that.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from tensorstow.base.sizes import round_up
from tensorstow.fsdp.shard_storage import Prefetcher, ShardStorage
from tensorstow.io.buffer_pool import PooledBuffer
from tensorstow.io.device_link import DeviceEvent, DeviceLink, is_away
from tensorstow.io.pinned import PinnedBlock
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.bounds import upload_buffers

_ALIGN = 128
_UPLOADS: "weakref.WeakKeyDictionary[nn.Module, Uploads]" = weakref.WeakKeyDictionary()


@dataclass(eq=False, slots=True)
class _Unit:
    """Shards that FSDP2 gathers together."""

    cells: Sequence[ShardStorage]
    dtypes: Sequence[torch.dtype]
    """That they are computed in."""
    buffer: PooledBuffer | None
    staged: Sequence[bool]
    """Which of them pass through pinned memory."""
    is_newest: bool = False
    """Somebody has waited for its update since the last step."""

    @property
    def sizes(self) -> list[int]:
        """Return the bytes that each shard takes of a buffer."""
        pairs = zip(self.cells, self.dtypes, strict=True)
        return [round_up(cell.padded.numel() * dtype.itemsize, _ALIGN) for cell, dtype in pairs]


@dataclass(eq=False, slots=True)
class _Buffer:
    """The device's memory for one unit, and pinned memory for what cannot be copied by itself."""

    away: torch.Tensor
    here: torch.Tensor | None
    ready: DeviceEvent
    """Behind what used the device's memory last."""
    copied: DeviceEvent | None = None
    """Behind the last copy up."""


@dataclass(eq=False, slots=True)
class _Upload:
    """A unit in a buffer."""

    unit: _Unit
    buffer: _Buffer
    shards: dict[int, torch.Tensor]
    """On the device, by the cell's id."""
    copied: DeviceEvent
    asked: set[int] = field(default_factory=set)
    """Cells that FSDP2 has asked for."""
    used: set[int] = field(default_factory=set)
    """And copied from."""


class Uploads:
    """One model's shards on their way to the device. Gathers come from any thread."""

    def __init__(self, link: DeviceLink, *, ahead: int, beside_forward: bool) -> None:
        """Go over ``link``, up to ``ahead`` units ahead of the one that is asked for.

        ``beside_forward``: updates run beside the next forward.
        """
        self.link = link
        self._ahead = ahead
        self._beside_forward = beside_forward
        self._units: list[_Unit] = []
        self._of: dict[int, _Unit] = {}
        self._prefetchers: dict[int, Prefetcher] = {}
        self._buffers: list[_Buffer] | None = None
        self._here: PinnedBlock | None = None
        self._under_way: dict[_Unit, _Upload] = {}
        self._copied: DeviceEvent | None = None
        """Behind the last copy up, and so behind all: they are on one stream."""
        self._last: tuple[_Unit | None, _Unit | None] = (None, None)
        self._next: dict[tuple[_Unit | None, _Unit | None], _Unit] = {}
        self._in_backward = False
        self._gathered: set[_Unit] = set()
        """In this backward."""
        self._alone: Callable[[], AbstractContextManager[object]] = nullcontext
        """Keeps out the optimizer's calls in other threads."""

    def watch(self, model: nn.Module, optimizer: StowedAdam) -> None:
        """Be found by ``model``, whose parameters have the cells; hear of what updates them."""
        _UPLOADS[model] = self
        self._alone = optimizer.alone
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._behind_step)
        optimizer.register_resume_hook(self.forget)

    def add(
        self,
        cells: Sequence[ShardStorage],
        dtypes: Sequence[torch.dtype],
        prefetcher: Prefetcher | None,
    ) -> None:
        """Take the cells of one unit and the dtypes that they are computed in.

        ``prefetcher``: of their buffer, where they are on one. All units are added before the first
        gather.
        """
        if not cells:
            return
        buffer = cells[0].pager
        pairs = list(zip(cells, dtypes, strict=True))
        staged = [not cell.is_page_locked or cell.padded.dtype != dtype for cell, dtype in pairs]
        unit = _Unit(cells, dtypes, buffer, staged)
        self._units.append(unit)
        for cell in cells:
            self._of[id(cell)] = unit
            cell.discard_copies = partial(self._forget, unit)
            if prefetcher is not None:
                self._prefetchers[id(cell)] = prefetcher

    @property
    def device_bytes(self) -> int:
        """Return the device's memory that shards pass through."""
        return self._count * self._largest

    @property
    def staging_bytes(self) -> int:
        """Return the host memory that shards pass through."""
        return self._count * self._largest_staged

    @property
    def pinned_bytes(self) -> int:
        """Return what of that is pinned."""
        return 0 if self._here is None else self._here.pinned_bytes

    # --- what FSDP2 asks ---

    @torch.no_grad()
    def take(self, cell: ShardStorage, dtype: torch.dtype) -> torch.Tensor:
        """Return the newest padded weight on the device, for the caller's stream to copy from."""
        with self._alone():
            return self._take(self._of[id(cell)], cell, dtype)

    def _take(self, unit: _Unit, cell: ShardStorage, dtype: torch.dtype) -> torch.Tensor:
        upload = self._under_way.get(unit)
        if upload is None or id(cell) in upload.asked:  # another gather
            if upload is not None:
                self._end(upload)  # one that an exception has ended
            upload = self._start(unit)
        cell.before_read()
        if upload is None or upload.shards[id(cell)].dtype != dtype:
            return self._at_once(cell, dtype)
        if not upload.asked:
            self.link.join(upload.copied)
            self._note(unit)
        upload.asked.add(id(cell))
        shard = upload.shards[id(cell)]
        if is_away(self.link.device):
            shard.record_stream(torch.accelerator.current_stream(self.link.device))
        return shard

    def used(self, cell: ShardStorage) -> None:
        """Say that the caller's stream is behind the copies of what ``take`` returned."""
        with self._alone():
            self._used(cell)

    def _used(self, cell: ShardStorage) -> None:
        upload = self._under_way.get(self._of[id(cell)])
        if upload is None or id(cell) not in upload.asked:
            return
        upload.used.add(id(cell))
        if len(upload.used) < len(upload.unit.cells):
            return
        if self._next.get(self._last) is upload.unit and not self._is_final(upload.unit):
            upload.asked.clear()  # the same unit comes next: behind a forward, its backward
            upload.used.clear()
        else:
            self._end(upload)
            self._go_ahead()

    # --- what changes weights ---

    def forget(self) -> None:
        """Return when no copy reads host memory; what was uploaded is old. Around a step."""
        with self._alone():
            self._wait_for_copies()
            for upload in list(self._under_way.values()):
                self._end(upload)
            self._last = (None, None)
            self._gathered.clear()
            for unit in self._units:
                unit.is_newest = False

    @torch.no_grad()
    def begin(self) -> None:
        """Upload what the next forward begins with. Behind a step."""
        with self._alone():
            self._in_backward = False
            self._go_ahead()

    def _before_step(self, *_: object) -> None:
        self.forget()

    def _behind_step(self, *_: object) -> None:
        with self._alone():
            self.forget()
            self.begin()

    def _forget(self, unit: _Unit) -> None:
        with self._alone():
            self._wait_for_copies()
            upload = self._under_way.get(unit)
            if upload is not None:
                self._end(upload)

    def _wait_for_copies(self) -> None:
        """Return when no copy reads host memory, also of a unit that gave way to another one."""
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    # --- inside ---

    def _note(self, unit: _Unit) -> None:
        """Learn that ``unit`` is gathered now, and begin with those that will be."""
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # as FSDP2 asks
        if in_backward != self._in_backward:
            self._in_backward = in_backward
            self._gathered.clear()
        self._gathered.add(unit)
        self._next[self._last] = unit
        self._last = (self._last[1], unit)
        prefetcher = self._prefetchers.get(id(unit.cells[0]))
        if prefetcher is not None and unit.buffer is not None:
            prefetcher.record_use(unit.buffer)
        self._go_ahead()

    def _is_final(self, unit: _Unit) -> bool:
        """Return whether ``unit`` may be updated before it is gathered again."""
        return self._in_backward and unit in self._gathered

    def _go_ahead(self) -> None:
        pair = self._last
        for _ in range(self._ahead):
            following = self._next.get(pair)
            if following is None or self._is_final(following):
                return
            if following not in self._under_way and not self._start_ahead(following):
                return
            pair = (pair[1], following)

    def _start_ahead(self, unit: _Unit) -> bool:
        """Begin with a unit that nobody has asked for, where nothing is to be waited for."""
        if self._beside_forward and not unit.is_newest:
            return False
        if unit.buffer is not None and not unit.buffer.is_ready():
            return False
        buffer = self._idle()
        if buffer is None or (any(unit.staged) and buffer.copied and not buffer.copied.query()):
            return False
        self._fill(unit, buffer)
        return True

    def _start(self, unit: _Unit) -> _Upload | None:
        """Begin with a unit that is asked for; None where FSDP2 holds all buffers."""
        for cell in unit.cells:
            cell.before_read()
        unit.is_newest = True
        buffer = self._idle()
        if buffer is None:
            guessed = next((u for u in self._under_way.values() if not u.asked), None)
            if guessed is None:
                return None
            self._end(guessed)
            buffer = guessed.buffer
        return self._fill(unit, buffer)

    def _idle(self) -> _Buffer | None:
        if self._buffers is None:
            self._buffers = self._make()
        taken = {id(upload.buffer) for upload in self._under_way.values()}
        return next((b for b in self._buffers if id(b) not in taken), None)

    def _end(self, upload: _Upload) -> None:
        """Let the buffer be filled again, behind what the caller's stream was given so far."""
        del self._under_way[upload.unit]
        if upload.asked:
            upload.buffer.ready = self.link.record_event()

    def _fill(self, unit: _Unit, buffer: _Buffer) -> _Upload:
        """Begin copying a unit's shards to ``buffer``."""
        if any(unit.staged) and buffer.copied is not None and not buffer.copied.query():
            buffer.copied.synchronize()  # the link is behind: pinned memory is still read
        if unit.buffer is not None:
            unit.buffer.pin()
        try:
            shards, pairs = self._cut(unit, buffer)
            # Where some of it is pageable, that has been read when this returns.
            self._copied = copied = self.link.h2d(pairs, [buffer.ready])
        finally:
            if unit.buffer is not None:
                unit.buffer.unpin()
        buffer.copied = buffer.ready = copied
        upload = self._under_way[unit] = _Upload(unit, buffer, shards, copied)
        return upload

    def _cut(
        self, unit: _Unit, buffer: _Buffer
    ) -> tuple[dict[int, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return each cell's part of ``buffer``, and what is to be copied from where to where."""
        shards, pairs = {}, []
        at = here_at = 0
        parts = zip(unit.cells, unit.dtypes, unit.sizes, unit.staged, strict=True)
        for cell, dtype, size, is_staged in parts:
            nbytes = cell.padded.numel() * dtype.itemsize
            shard = buffer.away[at : at + nbytes].view(dtype).view(cell.padded.shape)
            source = cell.padded
            if is_staged and buffer.here is not None:
                source = buffer.here[here_at : here_at + nbytes].view(dtype).view(shard.shape)
                source.copy_(cell.padded)
                here_at += size
            elif is_staged:
                source = cell.padded.to(dtype)
            shards[id(cell)] = shard
            pairs.append((shard.view(-1), source.view(-1)))
            cell.bytes_up += nbytes
            at += size
        return shards, pairs

    def _at_once(self, cell: ShardStorage, dtype: torch.dtype) -> torch.Tensor:
        """Copy a shard while the caller waits: FSDP2 gathers more units ahead than is foreseen."""
        with cell.access(write=False):
            given = cell.padded.to(self.link.device, dtype)
        cell.bytes_up += given.nbytes
        return given

    def _make(self) -> list[_Buffer]:
        """Take the memory of all buffers."""
        count, away, here = self._count, self._largest, self._largest_staged
        block = PinnedBlock(count * here, self.link.device, self.link.synchronize) if here else None
        self._here = block
        made = []
        for number in range(count):
            memory = torch.empty(away, dtype=torch.uint8, device=self.link.device)
            staged = None
            if block is not None and block.pinned:
                staged = block.tensor(number * here, here, torch.uint8)
            made.append(_Buffer(memory, staged, self.link.record_event()))
        return made

    @property
    def _count(self) -> int:
        return min(upload_buffers(self._ahead), len(self._units))

    @property
    def _largest(self) -> int:
        return max((sum(unit.sizes) for unit in self._units), default=0)

    @property
    def _largest_staged(self) -> int:
        sums = (
            sum(n for n, is_staged in zip(u.sizes, u.staged, strict=True) if is_staged)
            for u in self._units
        )
        return max(sums, default=0)


def uploads_of(model: nn.Module) -> Uploads | None:
    """Return the uploads of a model's shards; None where nothing goes up."""
    return _UPLOADS.get(model)
