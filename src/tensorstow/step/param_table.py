"""Which parameters have states in the store, and under which number."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch

from tensorstow.base.errors import OptionError, PoisonedError, StowError
from tensorstow.base.update_on import UpdateOn, reaches_device, told
from tensorstow.io import device_link
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import RESIDENT_CAPACITY, Family
from tensorstow.states.memory import StateMemory
from tensorstow.states.native_pipeline import StoredChunk, Traffic
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import ChunkStorage, StateStore
from tensorstow.states.stored import StoreStorage
from tensorstow.step.closing import Closing
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.device_update import DeviceUpdater
from tensorstow.step.division import Division
from tensorstow.step.host_weight import (
    HostWeight,
    Stamp,
    deliver,
    host_weight_bytes,
    make_host_weights,
    refresh,
    stamp_of,
)
from tensorstow.step.sides import Sides
from tensorstow.tensors.dtensor import (
    Order,
    Pager,
    in_order,
    order_of,
    out_of_order,
    pager_of,
    pinned_by,
    shard_of,
)
from tensorstow.tensors.on_disk import StateOnDisk

logger = logging.getLogger("tensorstow")

OnGradient = Callable[[torch.Tensor], None]


@dataclass(slots=True)
class ManagedParam:
    """A parameter whose states we keep."""

    owner: torch.Tensor
    """The parameter that users know: in groups, in ``optimizer.state``, with ``.grad``."""
    shard: torch.Tensor
    """What this rank has of it ([Note: Shards]); itself for most."""
    number: int
    """Its name in the store."""
    family: Family
    numel: int
    views: dict[str, torch.Tensor]
    """What ``optimizer.state`` has of it: its states in its shape where all of them are in RAM,
    else what stands in for them."""
    host: torch.Tensor | None = None
    """Its weight elsewhere for one step, where tests want to see who reads it too early."""
    begun: bool = False
    """It has states that are not zero."""
    written: Stamp | None = None
    """Version counter and address after our last update; others mean that someone else wrote."""
    host_weight: HostWeight | None = None
    """Its weight in host memory, where the parameter is on an accelerator."""
    pager: Pager | None = None
    """The buffer that its weight is in, where it is on disk."""
    order: Order | None = None
    """Of its dimensions in memory, where not their own ([Note: Memory formats])."""
    updated_there: bool = False
    """The device updates elements of it."""
    updated_here: bool = True
    """The host updates elements of it."""

    @property
    def parameter(self) -> torch.Tensor:
        """Return the shard as one run of elements in memory; itself for most.

        Raises OptionError where its data was exchanged for one of other dimensions.
        """
        if self.order is None:
            return self.shard
        if self.shard.dim() != len(self.order):
            message = (
                f"A parameter has {self.shard.dim()} dimensions and had {len(self.order)} when the"
                " optimizer was made: its data was exchanged. Make a new optimizer."
            )
            raise OptionError(message)
        return self.shard.detach().permute(self.order)

    def fits(self, *, amsgrad: bool) -> bool:
        """Return whether the parameter is still what its states were made for."""
        family, parameter = self.family, self.parameter
        return (
            parameter.numel() == self.numel
            and parameter.dtype == family.dtype
            and amsgrad == family.amsgrad
            and device_link.is_remote(parameter) == (self.host_weight is not None)
        )

    @property
    def written_by_others(self) -> bool:
        """Return whether a 16-bit weight must be compared with its master."""
        return self.written != stamp_of(self.parameter, self.owner)

    def held(self, *, for_write: bool = False) -> AbstractContextManager[None]:
        """Let the weight be in memory inside."""
        return pinned_by(self.pager, for_write=for_write)

    @property
    def weight(self) -> torch.Tensor:
        """Return what the kernel writes."""
        if self.host_weight is not None:
            return self.host_weight.host
        return self.parameter if self.host is None else self.host

    def remember(self) -> None:
        """Take what is there now for our own writing."""
        self.written = stamp_of(self.parameter, self.owner)
        if self.host_weight is not None:
            self.host_weight.remember()

    def leave_behind(self) -> None:
        """Say that an update on the device has not brought all of the new weight down."""
        if (
            self.host_weight is not None
            and self.updated_there
            and self.family.dtype == torch.float32
        ):
            self.host_weight.leave_behind()

    @property
    def needs_host_weight(self) -> bool:
        """Return whether a step that commits nothing looks at the whole of a mirror that is old.

        For 16-bit ones, which masters must fit. Of an fp32 one, what the host updates is what it
        has left there, while nobody else writes the parameter.
        """
        if self.family.dtype != torch.float32 or not self.updated_there:
            return True
        return self.updated_here and self.written_by_others


class ParamTable:
    """The parameters of one optimizer, the store of their states, and the hooks on them."""

    def __init__(self, offload_policy: OffloadPolicy, on_gradient: OnGradient) -> None:
        """Begin with nobody; raises for a directory that cannot hold states.

        ``on_gradient`` is called with each parameter whose gradient autograd has accumulated,
        where states move at all.
        """
        self.offload_policy = offload_policy
        # By id: hashing a tensor is a call into Python, a hundred times a step. Members hold the
        # parameters, so no id is used twice.
        self._by_id: dict[int, ManagedParam] = {}
        self._numbered: list[ManagedParam] = []
        self._on_gradient = on_gradient
        self._hooks: list[Any] = []
        self._unhooked: list[torch.Tensor] = []
        self._link: DeviceLink | None = None
        self.device_feed: DeviceFeed | None = None
        """What carries gradients and weights of parameters on an accelerator."""
        self.updater: DeviceUpdater | None = None
        """What updates there instead, where updates may run on the device."""
        self.sides: Sides | None = None
        """What runs a step on both, where there is an updater."""
        self.division = Division(offload_policy.update_on)
        self._share: float | None = None
        self._blocks: weakref.WeakSet[PinnedBlock] = weakref.WeakSet()
        self._kept_alive = False
        weakref.finalize(self, _remove, self._hooks)
        if offload_policy.format is not None and not offload_policy.format.exact:
            logger.warning(
                'state_format="%s" is inexact: moments are rounded by chance, and results differ'
                " from those of fp32 states",
                offload_policy.format.value,
            )
        placement = offload_policy.placement
        storage = (
            StoreStorage(placement.directories, offload_policy.policy)
            if placement.durable
            else None
        )
        self.store = self._new_store(storage)

    def _new_store(self, storage: ChunkStorage | None) -> StateStore:
        # Weakly: the store must go when its optimizer does, not when a cycle is found.
        weight_of = weakref.WeakMethod(self.weight)

        def weight(number: int) -> torch.Tensor:
            method = weight_of()
            if method is None:
                message = "The optimizer of these states is gone."
                raise PoisonedError(message)
            return method(number)

        pinned = weakref.WeakMethod(self._pinned)

        def take(nbytes: int) -> PinnedBlock:
            method = pinned()
            if method is None:
                message = "The optimizer of these states is gone."
                raise PoisonedError(message)
            return method(nbytes)

        offload_policy = self.offload_policy
        return StateStore(
            offload_policy.placement,
            offload_policy.policy,
            weight,
            storage,
            offload_policy.overlap,
            take if reaches_device(offload_policy.update_on) else None,
        )

    def update_on(self, where: UpdateOn) -> None:
        """Update there from ``restore`` on."""
        self.offload_policy = replace(self.offload_policy, update_on=where)

    def _pinned(self, nbytes: int) -> PinnedBlock:
        """Return memory that the accelerator copies from and to, for states."""
        if self._link is None:
            message = "Memory for states was asked for before the accelerator was known."
            raise StowError(message)
        block = PinnedBlock(nbytes, self._link.device, self._link.synchronize)
        self._blocks.add(block)
        return block

    def weight(self, number: int) -> torch.Tensor:
        """Return the weight of a number, in host memory; what others wrote is fetched first.

        A copy where it is on disk.
        """
        param = self._numbered[number]
        self._refresh([param])
        if param.pager is None:
            return param.weight
        with param.held():
            return param.weight.clone()

    def refresh(self, *, whole: bool = True) -> None:
        """Fetch weights on an accelerator that are newer there, as a step begins with it.

        Not ``whole``: only those that a step which commits nothing looks at.
        """
        whole = self._divide() or whole
        self._refresh(m for m in self._numbered if whole or m.needs_host_weight)

    def _refresh(self, managed: Iterable[ManagedParam]) -> None:
        if self._link is not None:
            refresh((m.host_weight for m in managed if m.host_weight is not None), self._link)

    def deliver(self) -> None:
        """Let every parameter on an accelerator be what host memory has of it."""
        if self._link is not None:
            remote = [m.parameter for m in self._numbered if m.host_weight is not None]
            torch.autograd.graph.increment_version(remote)
            deliver(
                (m.host_weight for m in self._numbered if m.host_weight is not None), self._link
            )

    def finish(self, numbers: Iterable[int] | None = None) -> None:
        """Let these parameters, or all, have their new weights for the caller's stream."""
        if self.device_feed is not None:
            self.device_feed.finish(numbers)

    def join(self) -> None:
        """Let the caller's stream be behind the weights that have been sent up."""
        if self.device_feed is not None:
            self.device_feed.join()

    def uses(self, number: int) -> bool:
        """Return whether the gradient of a parameter is still needed."""
        if self._numbered[number].host_weight is not None and self.device_feed is not None:
            return self.device_feed.needs(number)
        return not self.store.pipeline.is_published(number)

    def traffic(self) -> Traffic:
        """Return the bytes of states moved so far, and over the link to an accelerator."""
        moved = self.store.pipeline.traffic()
        if self._link is None:
            return moved
        down, up = self._link.bytes_down, self._link.bytes_up
        share = 0.0 if self.sides is None else self.sides.share
        return replace(moved, bytes_down=down, bytes_up=up, device_share=share)

    def memory(self) -> StateMemory:
        """Return the bytes of states and buffers, by place."""
        host_weights = (
            m.parameter for m in self._numbered if m.host_weight and self._reads_host_weight(m)
        )
        return replace(
            self.store.memory(),
            host_weight_bytes=host_weight_bytes(host_weights),
            staging_bytes=0 if self.device_feed is None else self.device_feed.plan.nbytes,
            device_bytes=0 if self.updater is None else self.updater.device_bytes,
            pinned_bytes=sum(block.pinned_bytes for block in self._blocks),
        )

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._by_id)

    def find(self, parameter: torch.Tensor) -> ManagedParam | None:
        """Return the member that ``parameter`` is, or None."""
        return self._by_id.get(id(parameter))

    def get(self, parameter: torch.Tensor) -> ManagedParam:
        """Return the member that ``parameter`` is; KeyError where it is none."""
        return self._by_id[id(parameter)]

    def by_id(self, identity: int) -> ManagedParam | None:
        """Return the member whose parameter has this ``id``, or None."""
        return self._by_id.get(identity)

    def all(self) -> Sequence[ManagedParam]:
        """Return every member, by number."""
        return self._numbered

    def attach(self, parameters: Iterable[torch.Tensor], amsgrad: Mapping[int, bool]) -> None:
        """Give states to those of ``parameters`` that have none.

        ``amsgrad`` tells for every parameter of the optimizer, by id, whether it wants that state.
        """
        new = [p for p in parameters if id(p) not in self._by_id]
        self._hook()
        if self._by_id and self._by_id.keys().isdisjoint(amsgrad):
            self.renew()  # every parameter was exchanged for another, as accelerate does
        if not new and self._by_id:
            return
        shards = [shard_of(p) for p in new]
        families = [self.offload_policy.family(p.dtype, amsgrad=amsgrad[id(p)]) for p in new]
        # What goes over a link goes by chunk, and what is updated beside forward or backward begins
        # when all of a chunk is there, so chunks in RAM are as small there as others.
        is_fine = self._open_link(shards) or self.offload_policy.overlap != "none"
        capacity = self.offload_policy.policy.chunk_elements if is_fine else RESIDENT_CAPACITY
        sizes = [s.numel() for s in shards]
        # What shares a chunk is in memory at once, so those whose weights come and go apart do not.
        apart = [id(pager_of(p)) for p in new]
        numbers = self.store.extend(sizes, families, capacity, apart)
        for parameter, shard, number, family in zip(new, shards, numbers, families, strict=True):
            states = self.store.views(number)
            self._add(parameter, number, family, in_shape_of(shard, states))
        self._connect(self._numbered[-len(new) :] if new else [])

    def restore(
        self,
        parameters: Sequence[torch.Tensor],
        families: Sequence[Family],
        chunks: Sequence[Chunk],
        adopt: Callable[[], Sequence[StoredChunk]],
    ) -> None:
        """Take ``parameters`` and their states as a commit has them, in place of all others.

        ``adopt`` holds what the disk has of each chunk, when what was held before has been let go.
        """
        self.renew()
        shards = [shard_of(p) for p in parameters]
        self._open_link(shards)
        sizes = [s.numel() for s in shards]
        self.store.restore(sizes, families, chunks, adopt())
        for number, (parameter, family) in enumerate(zip(parameters, families, strict=True)):
            self._add(parameter, number, family)
        self._connect(self._numbered)
        for param in self._numbered:
            if param.host_weight is not None:
                param.host_weight.remember()  # the weights are put into it next

    def _open_link(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether any are on an accelerator, to which there is a link from now on.

        Raises OptionError where they are on several, or on the host and updates are not.
        """
        mirrored = [m.parameter for m in self._numbered if m.host_weight is not None]
        remote = [p for p in parameters if device_link.is_remote(p)]
        devices = {p.device for p in (*mirrored, *remote)}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            message = (
                f"Parameters on {names} were given to one optimizer, whose link goes to one"
                " accelerator. Make an optimizer for the parameters of each."
            )
            raise OptionError(message)
        where = self.offload_policy.update_on
        if reaches_device(where) and len(remote) < len(parameters):
            message = (
                f"{len(parameters) - len(remote)} of {len(parameters)} parameters are in host"
                f" memory, and {told(where)} was asked for, which updates on the accelerator"
                ' that has them. Move the model there first, or use update_on="host".'
            )
            raise OptionError(message)
        if remote and self._link is None:
            self._link = device_link.open_link(remote[0].device)
        return bool(remote)

    def _connect(self, managed: Sequence[ManagedParam]) -> None:
        """Give mirrors to those of ``params`` that are on an accelerator, and carry for them."""
        remote = [m for m in managed if device_link.is_remote(m.parameter)]
        if not remote:
            return
        link = self._link or device_link.open_link(remote[0].parameter.device)
        self._link = link
        for used in (True, False):
            group = [m for m in remote if self._reads_host_weight(m) == used]
            block, host_weights = make_host_weights(
                [m.shard for m in group], link, [m.owner for m in group], pinned=used
            )
            self.store.pipeline.lent.append(block)
            self._blocks.add(block)
            for param, host_weight in zip(group, host_weights, strict=True):
                param.host_weight = host_weight
        known = {m.number: m.host_weight for m in self._numbered if m.host_weight is not None}
        pipeline = self.store.pipeline
        chunks = self.store.chunks
        where = self.offload_policy.update_on
        closing = Closing(pipeline, 1 + (reaches_device(where) and where != "device"))
        if where != "device":
            self.device_feed = DeviceFeed(link, pipeline, chunks, known, closing)
            pipeline.lent.append(self.device_feed.staging)
            self._blocks.add(self.device_feed.staging)
        if reaches_device(where):
            streams_at = self.store.streams_at
            self.updater = DeviceUpdater(link, pipeline, chunks, known, streams_at, closing)
            self.sides = Sides(link, pipeline, chunks, self.device_feed, self.updater)
            self._share = None
            self._divide()  # who was there before stays on his side: chunks_of_device

    def _divide(self) -> bool:
        """Give host and device their chunks; return whether these are others than before."""
        share = self.division.share
        if self.sides is None or share == self._share:
            return False
        self._share = share
        there = {n for chunk in self.sides.divide(share) for n in chunk.owners}
        here = {n for chunk in self.sides.chunks_of_host for n in chunk.owners}
        for param in self._numbered:
            param.updated_there = param.number in there
            param.updated_here = param.number in here
        return True

    def _reads_host_weight(self, param: ManagedParam) -> bool:
        """Return whether steps need the weight in host memory."""
        idle = (
            self.offload_policy.update_on == "device" and not self.offload_policy.placement.durable
        )
        return not (idle and param.family.dtype == torch.float32)

    def differ(self, amsgrad: Mapping[int, bool]) -> bool:
        """Return whether a member has other states than its group wants."""
        managed = self._by_id.items()
        return any(amsgrad.get(i, m.family.amsgrad) != m.family.amsgrad for i, m in managed)

    def forget_versions(self) -> None:
        """Compare every weight with its master at the next update."""
        for param in self._by_id.values():
            param.written = None

    def renew(self) -> None:
        """Drop all states and begin with an empty store in the same place."""
        storage: ChunkStorage | None = None
        if self.offload_policy.placement.durable:
            storage = self.store.leave()
            if isinstance(storage, StoreStorage):
                storage.release_all()
        else:
            self.store.close()
        self._begin_in(storage)

    def move_to(self, storage: StoreStorage, offload_policy: OffloadPolicy) -> None:
        """Drop all states and begin with an empty store in ``storage``; close the one before."""
        self.store.leave().close()
        self.offload_policy = offload_policy
        self._begin_in(storage)

    def _begin_in(self, storage: ChunkStorage | None) -> None:
        _remove(self._hooks)
        self._unhooked.clear()
        if self._link is not None:
            self._link.synchronize()  # a step that is given up: its gradients may be on their way
        self.store = self._new_store(storage)
        if self._kept_alive:
            self.store.keep()
        self._by_id, self._numbered = {}, []
        self.device_feed = self.updater = self.sides = None
        self.division = Division(self.offload_policy.update_on)

    def outlive_finalizers(self) -> None:
        """Keep the store from closing itself before ``close`` or ``abandon``."""
        self._kept_alive = True
        self.store.keep()

    def abandon(self) -> None:
        """Let go of the store without closing it, in a forked child, which may not."""
        self.store.abandon()

    def close(self) -> None:
        """Drop states, buffers, files and hooks. Idempotent."""
        _remove(self._hooks)
        self.store.close()

    def _add(
        self,
        parameter: torch.Tensor,
        number: int,
        family: Family,
        views: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        shard = shard_of(parameter)
        seen = views or dict.fromkeys(family.states, StateOnDisk(shard))
        param = ManagedParam(parameter, shard, number, family, shard.numel(), dict(seen))
        param.pager = pager_of(parameter)
        param.order = order_of(shard)
        self._by_id[id(parameter)] = param
        self._numbered.append(param)
        if self.offload_policy.moving or self.offload_policy.overlap == "backward":
            self._unhooked.append(parameter)
            self._hook()

    def _hook(self) -> None:
        """Watch the parameters that torch lets us watch: a frozen one later."""
        still: list[torch.Tensor] = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(self._on_gradient))
            else:
                still.append(parameter)
        self._unhooked = still


def in_order_of(param: ManagedParam, state: torch.Tensor) -> torch.Tensor:
    """Return a saved state of ``param``, of any shape, with its elements as in memory."""
    return state if param.order is None else state.reshape(param.shard.shape).permute(param.order)


def in_shape_of(shard: torch.Tensor, states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return 1-D states, in the order of the shard's memory, in its shape."""
    order = order_of(shard)
    shape = in_order(shard, order).shape
    return {name: out_of_order(state.view(shape), order) for name, state in states.items()}


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
