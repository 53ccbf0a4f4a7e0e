"""Copies shards in host memory to the accelerator before FSDP2 all-gathers them.

[Note: Prefetch to the device] FSDP2 reads a unit's shards one after the other, in its all-gather
stream, and on a single rank just before it computes with them. So they are copied on a separate
stream, unit by unit, into buffers on the device that are allocated once: the unit that is gathered
now, and the next ones by ``UseOrder``. Streams wait for each other and the host for none: a buffer
is filled again after the all-gather that read it.

    free -> copying (h2d) -> in use (FSDP2 copies from it) -> free
                          -> in use again without a copy, if the same unit comes next

A unit whose copy stays for its backward ([Note: Device cache]) has a buffer of its own.

Page-locked bytes in compute dtype are copied directly. Others (in a pool's buffer, pageable, to be
cast) pass through pinned memory next to the device's, so that a pool's buffer is unpinned at once.

[Note: Old weights] A copy must be of the newest weight, and host memory must not change during a
copy. Before a step, a resume or a write to a parameter, copies are waited for and discarded. A
write to a tensor of ``state_dict`` on a single rank changes the tensor's version, which is compared
when a copy is used. Under overlap="backward" a weight is updated when its gradient is final, so a
unit that was gathered in a backward is not prefetched again in it. Under overlap="forward" a weight
is prefetched only after a wait for its update.

FSDP2 gathers in the device's thread during backward; if a backward has raised, it may do so while
the caller is in its next call ([Note: Hooks] in step/call_lock.py). So code that reads or changes
copies holds the lock of the optimizer's calls: such a gather runs before or after ``resume()``. It
may also run between a step's hooks and its call, or during a write to a parameter: copies are
discarded before weights change and again afterwards.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import torch
from torch import nn

from tensorstow.base.sizes import round_up
from tensorstow.base.update_on import UpdateTiming
from tensorstow.fsdp.device_cache import DeviceCache
from tensorstow.fsdp.shard_storage import Prefetcher, ShardStorage
from tensorstow.fsdp.units import found_in
from tensorstow.io.device_link import DeviceEvent, DeviceLink, DeviceMemory, is_away
from tensorstow.io.pinned import PinnedBlock
from tensorstow.memory.buffer_pool import PooledBuffer
from tensorstow.memory.use_order import UseOrder
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.planner.bounds import upload_buffers
from tensorstow.tensors.dtensor import pinned_by

_ALIGN = 128
_PREFETCHERS: "weakref.WeakKeyDictionary[nn.Module, H2DPrefetcher]" = weakref.WeakKeyDictionary()


@dataclass(eq=False, slots=True)
class _Unit:
    """Shards that FSDP2 all-gathers together."""

    shards: Sequence[ShardStorage]
    dtypes: Sequence[torch.dtype]
    """The compute dtype of each shard."""
    staged: Sequence[bool]
    """Whether each shard passes through pinned memory."""
    prefetcher: Prefetcher | None
    """Reads ahead from disk; None: the shards are not on disk."""
    is_newest: bool = False
    """Whether its update was waited for since the last step."""

    @property
    def pagers(self) -> Sequence[PooledBuffer]:
        """Return the buffers of shards that have some; empty: all of them stay in host memory."""
        return next((shard.unit for shard in self.shards if shard.unit), ())

    @property
    def sizes(self) -> list[int]:
        """Return the bytes that each shard takes of a buffer."""
        pairs = zip(self.shards, self.dtypes, strict=True)
        return [round_up(shard.padded.numel() * dtype.itemsize, _ALIGN) for shard, dtype in pairs]

    @property
    def staged_bytes(self) -> int:
        """Return the bytes that pass through pinned memory."""
        return sum(n for n, is_staged in zip(self.sizes, self.staged, strict=True) if is_staged)


@dataclass(eq=False, slots=True)
class _Staging:
    """Pinned memory for the shards of one unit that are staged; None: pinning failed."""

    memory: torch.Tensor | None
    copied: DeviceEvent | None = None
    """The event of the last copy from it."""


@dataclass(eq=False, slots=True)
class _Copied:
    """A unit in a buffer."""

    unit: _Unit
    buffer: DeviceMemory
    on_device: dict[int, torch.Tensor]
    """Each shard on the device, by the id of its storage."""
    complete: DeviceEvent
    versions: Sequence[int]
    """Versions of the shards' weights when they were copied; they differ after writes by torch."""
    gathered: set[int] = field(default_factory=set)
    """Ids of the shards that FSDP2 gathers."""
    used: set[int] = field(default_factory=set)
    """Ids of those that it has copied from the buffer."""

    @property
    def is_old(self) -> bool:
        """Return whether a weight was written since the copy began."""
        return self.versions != _versions_of(self.unit)

    def keep(self, link: DeviceLink) -> None:
        """Mark no shard as gathered, to use the copy again."""
        self.buffer.last_use = link.record_event()
        self.gathered.clear()
        self.used.clear()


class DeviceBuffers:
    """Device memory for copies: a few shared buffers, and one for each unit whose copy stays."""

    def __init__(self, link: DeviceLink, ahead: int) -> None:
        """Allocate nothing yet; copy over ``link``, with up to ``ahead`` units prefetched."""
        self.link = link
        self._ahead = ahead
        self._units: list[_Unit] = []
        self._buffers: list[DeviceMemory] | None = None
        self._unit_buffers: dict[_Unit, DeviceMemory] = {}
        self._staging: list[_Staging] = []
        """The least recently used one first."""
        self._staging_block: PinnedBlock | None = None
        self._last_copy: DeviceEvent | None = None
        """The event of the last copy, which completes after all others: they are on one stream."""

    def add(self, unit: _Unit) -> None:
        """Make buffers large enough for ``unit``; all units are added before the first copy."""
        self._units.append(unit)

    @property
    def device_bytes(self) -> int:
        """Return the bytes of the shared buffers on the device."""
        return self._count * self._largest

    @property
    def own_bytes(self) -> int:
        """Return the bytes of the buffers of units whose copies stay."""
        return sum(buffer.bytes.nbytes for buffer in self._unit_buffers.values())

    @property
    def staging_bytes(self) -> int:
        """Return the bytes of host memory that staged shards pass through."""
        return self._count * self._largest_staged

    @property
    def pinned_bytes(self) -> int:
        """Return the pinned bytes of host memory."""
        return 0 if self._staging_block is None else self._staging_block.pinned_bytes

    def free_one(self, taken: Collection[DeviceMemory]) -> DeviceMemory | None:
        """Return a shared buffer that is not among ``taken``; None if all are."""
        if self._buffers is None:
            self._buffers = [DeviceMemory(self._largest, self.link) for _ in range(self._count)]
        return next((buffer for buffer in self._buffers if buffer not in taken), None)

    def unit_buffer(self, unit: _Unit) -> DeviceMemory:
        """Return the unit's own buffer."""
        if unit not in self._unit_buffers:
            self._unit_buffers[unit] = DeviceMemory(sum(unit.sizes), self.link)
        return self._unit_buffers[unit]

    def free_own(self, units: Iterable[_Unit]) -> None:
        """Free the own buffers of these units; they must hold no copy."""
        for unit in units:
            self._unit_buffers.pop(unit, None)

    def free(self) -> None:
        """Free all buffers on the device; they hold no copy that is used."""
        self._buffers = None
        self._unit_buffers.clear()

    def is_staging_free(self, unit: _Unit) -> bool:
        """Return whether ``unit`` can be staged without waiting for a copy from pinned memory."""
        first = self._staging[0].copied if any(unit.staged) and self._staging else None
        return first is None or first.query()

    def copy(self, unit: _Unit, buffer: DeviceMemory) -> _Copied:
        """Begin copying a unit's shards to ``buffer``."""
        staging = self._take_staging() if any(unit.staged) else None
        # Before the copy begins: a write during the copy has to make it old.
        versions = _versions_of(unit)
        with ExitStack() as pinned:
            for pager in unit.pagers:
                pinned.enter_context(pinned_by(pager))
            on_device, pairs = self._lay_out(unit, buffer, staging)
            # Pageable memory has been read when this returns.
            self._last_copy = complete = self.link.h2d(pairs, [buffer.last_use])
        buffer.last_use = complete
        if staging is not None:
            staging.copied = complete
        return _Copied(unit, buffer, on_device, complete, versions)

    def wait_for_copies(self) -> None:
        """Wait until no copy reads host memory, including copies of units that were replaced."""
        if self._last_copy is not None:
            self._last_copy.synchronize()
            self._last_copy = None

    def _take_staging(self) -> _Staging:
        """Return pinned memory that no copy reads any more."""
        if not self._staging:
            self._staging = self._allocate_staging()
        staging = self._staging[0]
        if staging.copied is not None:
            staging.copied.synchronize()  # a copy may still read the pinned memory
        self._staging.append(self._staging.pop(0))
        return staging

    @staticmethod
    def _lay_out(
        unit: _Unit, buffer: DeviceMemory, staging: _Staging | None
    ) -> tuple[dict[int, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
        """Return each shard's part of ``buffer``, and pairs of targets and sources to copy."""
        on_device, pairs = {}, []
        at = staged_at = 0
        parts = zip(unit.shards, unit.dtypes, unit.sizes, unit.staged, strict=True)
        for shard, dtype, size, is_staged in parts:
            target = buffer.tensor(at, shard.padded.numel(), dtype).view(shard.padded.shape)
            source = shard.padded
            if is_staged and staging is not None and staging.memory is not None:
                part = staging.memory[staged_at : staged_at + target.nbytes]
                source = part.view(dtype).view(target.shape)
                source.copy_(shard.padded)
                staged_at += size
            elif is_staged:
                source = shard.padded.to(dtype)
            on_device[id(shard)] = target
            pairs.append((target.view(-1), source.view(-1)))
            shard.bytes_up += target.nbytes
            at += size
        return on_device, pairs

    def _allocate_staging(self) -> list[_Staging]:
        count, staged, device = self._count, self._largest_staged, self.link.device
        block = PinnedBlock(count * staged, device, self.link.synchronize)
        self._staging_block = block
        if not block.pinned:
            return [_Staging(None) for _ in range(count)]
        return [_Staging(block.tensor(i * staged, staged, torch.uint8)) for i in range(count)]

    @property
    def _count(self) -> int:
        return min(upload_buffers(self._ahead), len(self._units))

    @property
    def _largest(self) -> int:
        return max((sum(unit.sizes) for unit in self._units), default=0)

    @property
    def _largest_staged(self) -> int:
        return max((unit.staged_bytes for unit in self._units), default=0)


class H2DPrefetcher:
    """Copies one model's shards to the device ahead of their all-gather. Any thread may call."""

    def __init__(
        self, link: DeviceLink, *, ahead: int, timing: UpdateTiming, limit_bytes: int | None = None
    ) -> None:
        """Begin with no units.

        Args:
            link: The link to copy over.
            ahead: How many units are prefetched beyond the one that is gathered.
            timing: When updates run.
            limit_bytes: Copies stay on the device from forward to backward while torch's allocated
                bytes are below this limit; None: no copy stays.
        """
        self.link = link
        self.buffers = DeviceBuffers(link, ahead)
        self.cache: DeviceCache[_Unit] | None = None
        """Chooses the units whose copies stay; None: no copy stays."""
        if limit_bytes is not None:
            buffers = self.buffers
            self.cache = DeviceCache(link.device, limit_bytes, lambda: buffers.own_bytes)
        self._ahead = ahead
        self._timing = timing
        self._units: dict[int, _Unit] = {}
        """Units by the id of each of their shards."""
        self._copies: dict[_Unit, _Copied] = {}
        self._order: UseOrder[_Unit] = UseOrder()
        self._in_backward = False
        self._gathered: set[_Unit] = set()
        """Units that were gathered in this backward."""
        self._alone: Callable[[], AbstractContextManager[object]] = nullcontext
        """Keeps out the optimizer's calls in other threads."""

    def register(self, model: nn.Module, optimizer: StowedAdam) -> None:
        """Discard old copies whenever ``optimizer`` updates ``model``, whose shards were added."""
        _PREFETCHERS[model] = self
        self._alone = optimizer._alone  # noqa: SLF001  # a hook of the engine
        optimizer.register_step_pre_hook(self._pre_step)
        optimizer.register_step_post_hook(self._post_step)
        optimizer._register_rewrite_hook(self.discard)  # noqa: SLF001  # a hook of the engine

    def add_unit(
        self,
        shards: Sequence[ShardStorage],
        dtypes: Sequence[torch.dtype],
        prefetcher: Prefetcher | None,
        *,
        is_gathered_twice: bool = True,
    ) -> None:
        """Add a unit's shards with their compute dtypes, before the first all-gather.

        Without a ``prefetcher`` they are not on disk. ``is_gathered_twice``: backward gathers the
        unit too, so that its copy in host memory may stay for backward.
        """
        if not shards:
            return
        pairs = zip(shards, dtypes, strict=True)
        staged = [not shard.is_page_locked or shard.padded.dtype != dtype for shard, dtype in pairs]
        unit = _Unit(shards, dtypes, staged, prefetcher)
        self.buffers.add(unit)
        if self.cache is not None and is_gathered_twice and not unit.pagers:
            self.cache.add(unit, sum(unit.sizes))
        for shard in shards:
            self._units[id(shard)] = unit
            shard.discard_copies = partial(self._discard_unit, unit)

    # --- called by FSDP2 ---

    @torch.no_grad()
    def all_gather_input(self, shard: ShardStorage, dtype: torch.dtype) -> torch.Tensor:
        """Return the newest padded weight on the device, for the caller's stream to copy from."""
        unit = self._units[id(shard)]
        with self._alone():
            copied = self._copies.get(unit)
            is_old = copied is not None and not copied.gathered and copied.is_old
            if copied is None or is_old or id(shard) in copied.gathered:  # another all-gather
                if copied is not None:
                    self._release(copied)  # the earlier all-gather was ended by an exception
                copied = self._copy(unit)
            shard.before_read()
            # FSDP2 uses all buffers, or gathers in another dtype than that of the copy.
            if copied is None or copied.on_device[id(shard)].dtype != dtype:
                return _copy_and_wait(shard, dtype, self.link.device)
            if not copied.gathered:
                self.link.join(copied.complete)
                self._record_all_gather(unit)
            copied.gathered.add(id(shard))
            weight = copied.on_device[id(shard)]
            if is_away(self.link.device):
                # A freed buffer must not be reused before this stream has read it.
                weight.record_stream(torch.accelerator.current_stream(self.link.device))
            return weight

    def record_copied(self, shard: ShardStorage) -> None:
        """Record that the caller's stream has read the copy of ``shard``."""
        with self._alone():
            copied = self._copies.get(self._units[id(shard)])
            if copied is None or id(shard) not in copied.gathered:
                return
            copied.used.add(id(shard))
            if len(copied.used) < len(copied.unit.shards):
                return
            following = next(self._order.following(), None)
            if following is copied.unit and not self._may_be_updated(copied.unit):
                copied.keep(self.link)  # the same unit comes next: its backward after its forward
            elif self._stays(copied):
                copied.keep(self.link)
                self._prefetch_following()
            else:
                self._release(copied)
                self._prefetch_following()

    # --- changes to weights ---

    def discard(self, *_: object) -> None:
        """Wait until no copy reads host memory, and discard all copies, for a step or a resume."""
        with self._alone():
            self.buffers.wait_for_copies()
            for copied in list(self._copies.values()):
                self._release(copied)
            # Uses from here on are predicted by those that followed an earlier discard().
            self._order.last = (None, None)
            self._gathered.clear()
            for unit in self._units.values():
                unit.is_newest = False

    @torch.no_grad()
    def prefetch(self) -> None:
        """Begin copying the first units of the next forward, unless their updates run in it."""
        with self._alone():
            self._in_backward = False
            if not self._timing.waits_by_module:
                self._prefetch_following()

    def _pre_step(self, optimizer: StowedAdam, *_: object) -> None:
        # Under overlap="backward" the last copies complete after most of its gradients, and updates
        # begin meanwhile. A weight whose gradient is ready has been copied.
        with self._alone():
            while optimizer._wait_for_gradient():  # noqa: SLF001  # a hook of the engine
                pass
            self.discard()

    def _post_step(self, *_: object) -> None:
        with self._alone():
            self.discard()
            if self.cache is not None:
                self.cache.measure()
                # After discard(): none of these buffers holds a copy.
                self.buffers.free_own(u for u in self._units.values() if u not in self.cache)
            self.prefetch()

    def _discard_unit(self, unit: _Unit) -> None:
        with self._alone():
            self.buffers.wait_for_copies()
            copied = self._copies.get(unit)
            if copied is not None:
                self._release(copied)

    # --- with the lock held ---

    def _record_all_gather(self, unit: _Unit) -> None:
        """Record the gather of ``unit``, and prefetch the units that follow."""
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # as FSDP2 asks
        if in_backward != self._in_backward:
            self._in_backward = in_backward
            self._gathered.clear()
        self._gathered.add(unit)
        self._order.record(unit)
        # FSDP2 pins no shard that is copied here: record the use, for the next reads from disk.
        if unit.prefetcher is not None and unit.pagers:
            unit.prefetcher.record_use(*unit.pagers)
        self._prefetch_following()

    def _may_be_updated(self, unit: _Unit) -> bool:
        """Return whether ``unit`` may be updated before it is gathered again."""
        return self._in_backward and unit in self._gathered

    def _prefetch_following(self) -> None:
        for unit in islice(self._order.following(), self._ahead):
            if self._may_be_updated(unit):
                return
            if unit not in self._copies and not self._prefetch(unit):
                return

    def _prefetch(self, unit: _Unit) -> bool:
        """Begin copying a unit ahead of its gather, unless that would have to wait."""
        if self._timing.is_overlapped and not unit.is_newest:
            if not all(shard.is_updated() for shard in unit.shards):
                return False
            self._wait_for_updates(unit)
        if not all(pager.is_ready() for pager in unit.pagers):
            return False
        buffer = self._free_buffer(unit)
        if buffer is None or not self.buffers.is_staging_free(unit):
            return False
        self._copies[unit] = self.buffers.copy(unit, buffer)
        return True

    def _copy(self, unit: _Unit) -> _Copied | None:
        """Begin copying the unit that is gathered; return None if FSDP2 uses all buffers."""
        self._wait_for_updates(unit)
        buffer = self._free_buffer(unit)
        if buffer is None:
            shared = [c for c in self._copies.values() if not self._has_own(c)]
            # A unit that was only predicted gives its buffer to the unit that is gathered.
            guessed = next((c for c in shared if not c.gathered), None)
            if guessed is None:
                return None
            self._release(guessed)
            buffer = guessed.buffer
        copied = self._copies[unit] = self.buffers.copy(unit, buffer)
        return copied

    @staticmethod
    def _wait_for_updates(unit: _Unit) -> None:
        for shard in unit.shards:
            shard.before_read()
        unit.is_newest = True

    def _free_buffer(self, unit: _Unit) -> DeviceMemory | None:
        if self.cache is not None and unit in self.cache:
            return self.buffers.unit_buffer(unit)
        return self.buffers.free_one([copied.buffer for copied in self._copies.values()])

    def _has_own(self, copied: _Copied) -> bool:
        return self.cache is not None and copied.unit in self.cache

    def _stays(self, copied: _Copied) -> bool:
        """Return whether the copy is the newest weight until the next step."""
        updated = self._timing.begins_early and self._may_be_updated(copied.unit)
        return self._has_own(copied) and not updated

    def _release(self, copied: _Copied) -> None:
        """Free the buffer for the next copy, after the work of the caller's stream."""
        del self._copies[copied.unit]
        # If nobody has read the copy, ``last_use`` stays the event of the copy itself.
        if copied.gathered:
            copied.buffer.last_use = self.link.record_event()


def _versions_of(unit: _Unit) -> list[int]:
    return [shard.padded._version for shard in unit.shards]  # noqa: SLF001  # as of `local_shard`


def _copy_and_wait(shard: ShardStorage, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy a shard synchronously, if FSDP2 gathers more units ahead than there are buffers."""
    with shard.access(write=False):
        weight = shard.padded.to(device, dtype)
    shard.bytes_up += weight.nbytes
    return weight


def h2d_prefetcher_of(model: nn.Module) -> H2DPrefetcher | None:
    """Return the prefetcher of ``model``; None if there is none."""
    return found_in(_PREFETCHERS, model)
