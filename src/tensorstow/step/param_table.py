"""``ParamTable``: every parameter that has states, by number."""

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tensorstow.base.errors import OptionError, PoisonedError, StowError
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import UpdateOn, reaches_device, told
from tensorstow.io import device_link
from tensorstow.io.device_link import DeviceLink, PlainLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.states.chunk_transfers import ChunkStorage
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import RESIDENT_CAPACITY, Family
from tensorstow.states.memory import StateMemory
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import StateStore
from tensorstow.states.stored import StoreStorage
from tensorstow.states.stored_chunks import StoredChunk
from tensorstow.states.traffic import Traffic
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.device_update import DeviceUpdater
from tensorstow.step.disk_feed import DiskFeed
from tensorstow.step.division import Division
from tensorstow.step.gradient_feed import GradientFeed, HostFeed, StepFeeds, StepPath
from tensorstow.step.host_weight import deliver, host_weight_bytes, make_host_weights, refresh
from tensorstow.step.managed_param import ManagedParam, in_shape_of
from tensorstow.step.sides import DeviceUpdates
from tensorstow.tensors.dtensor import order_of, pager_of, shard_of
from tensorstow.tensors.placeholder import StateOnDisk

logger = logging.getLogger("tensorstow")

OnGradient = Callable[[torch.Tensor], None]


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
        self._connected = 0
        """How many of them have their host weights, and are known to the path."""
        self._on_gradient = on_gradient
        self._hooks: list[Any] = []
        self._unhooked: list[torch.Tensor] = []
        self._link: DeviceLink = PlainLink()
        self._state_link: DeviceLink = self._link
        """For the states that are updated on the accelerator."""
        self._is_linked = False
        """There are parameters on an accelerator, to which the link goes."""
        self.device_feeds: list[DeviceFeed] = []
        """One where gradients of an accelerator's parameters are copied down."""
        self.updaters: list[DeviceUpdater] = []
        """One where updates may run on the accelerator."""
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
        policy = offload_policy.policy
        storage = StoreStorage(placement.directories, policy) if placement.durable else None
        self.store = self._new_store(storage)
        self.path: StepPath = self._path_of_feeds()
        """By which steps take gradients to the pipeline ([Note: Feeds])."""

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
        if not self._is_linked:
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
        with param.held():  # which ends here, so of a weight on disk a copy is returned
            return param.weight.clone() if param.tier is Tier.DISK else param.weight

    def refresh(self, *, whole: bool = True) -> None:
        """Fetch weights on an accelerator that are newer there, as a step begins with it.

        Not ``whole``: only those that a step which commits nothing looks at.
        """
        whole = self._divide() or whole
        self._let_go_of_a_side()
        self._refresh(m for m in self._numbered if whole or m.needs_host_weight)

    def _refresh(self, managed: Iterable[ManagedParam]) -> None:
        refresh((m.on_host for m in managed if m.tier is Tier.DEVICE), self._link)

    def deliver(self) -> None:
        """Let every parameter on an accelerator be what host memory has of it."""
        remote = self._on_device()
        torch.autograd.graph.increment_version([param.parameter for param in remote])
        deliver((param.on_host for param in remote), self._link)

    def _on_device(self) -> list[ManagedParam]:
        return [param for param in self._numbered if param.tier is Tier.DEVICE]

    def uses(self, number: int) -> bool:
        """Return whether the gradient of a parameter is still needed."""
        return self.path.needs(self._numbered[number])

    @property
    def link(self) -> DeviceLink:
        """The link that gradients and new weights go over."""
        return self._link

    def traffic(self) -> Traffic:
        """Return the bytes of states moved so far, and over the link to an accelerator."""
        moved = self.store.pipeline.counters.traffic()
        down, up = self._link.bytes_down, self._link.bytes_up
        return replace(moved, bytes_down=down, bytes_up=up, device_share=self.path.device_share)

    def memory(self) -> StateMemory:
        """Return the bytes of states and buffers, by place."""
        host_weights = (m.parameter for m in self._on_device() if self._reads_host_weight(m))
        return replace(
            self.store.memory(),
            host_weight_bytes=host_weight_bytes(host_weights),
            staging_bytes=self.path.staging_bytes,
            device_bytes=self.path.device_bytes,
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
            self._connect_all()
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
        self._connect_all()

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
        self._connect_all()
        for param in self._on_device():
            param.on_host.remember()  # the weights are put into it next

    def _open_link(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether any are on an accelerator, to which there is a link from now on.

        Raises OptionError where they are on several, or on the host and updates are not.
        """
        mirrored = [param.parameter for param in self._on_device()]
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
        if remote and not self._is_linked:
            self._link, self._is_linked = device_link.open_link(remote[0].device), True
            self._state_link = self._link.beside()
        return bool(remote)

    def _connect_all(self) -> None:
        """Connect the parameters that are not yet: the new ones, and where that failed, those."""
        if self._connected < len(self._numbered) or not self._numbered:
            self._connect(self._numbered[self._connected :])
            self._connected = len(self._numbered)

    def _connect(self, managed: Sequence[ManagedParam]) -> None:
        """Give host weights to those of ``managed`` that are on an accelerator; make the path."""
        remote = [m for m in managed if device_link.is_remote(m.parameter)]
        if remote:
            self._connect_device(remote)
        if self.updaters:
            return
        self.path = self._path_of_feeds()

    def _connect_device(self, remote: Sequence[ManagedParam]) -> None:
        link, pipeline, chunks = self._link, self.store.pipeline, self.store.chunks
        for used in (True, False):
            group = [m for m in remote if self._reads_host_weight(m) == used]
            block, host_weights = make_host_weights(
                [m.shard for m in group], link, [m.owner for m in group], pinned=used
            )
            pipeline.memory.append(block)
            self._blocks.add(block)
            for param, host_weight in zip(group, host_weights, strict=True):
                param.hold_on_device(host_weight)
        known = {param.number: param.on_host for param in self._on_device()}
        where, chosen = self.offload_policy.update_on, self.division.chosen
        self.device_feeds = []
        if where != "device" and chosen != 1.0:
            feed = DeviceFeed(link, pipeline, chunks, known)
            self.device_feeds = [feed]
            pipeline.memory.append(feed.staging)
            self._blocks.add(feed.staging)
        if reaches_device(where) and chosen != 0.0:
            updater = DeviceUpdater(
                self._state_link, pipeline, chunks, known, self.store.streams_at
            )
            self.updaters = [updater]
            self._blocks.add(updater.tables)
            feeds, division = self.device_feeds, self.division
            self.path = DeviceUpdates(link, pipeline, chunks, feeds, updater, division)
            before, self._share = self._share, None
            self._divide()
            if before is not None:
                self._share = before  # where it is another one now, refresh() fetches what moves
        else:
            self.updaters = []

    def _let_go_of_a_side(self) -> None:
        """Give back the memory of the side that "auto" has not chosen, between steps."""
        chosen = self.division.chosen
        if chosen is None or not (self.device_feeds and self.updaters):
            return
        if chosen == 0.0:
            self.updaters = []
            self.path = self._path_of_feeds()
            return
        pipeline = self.store.pipeline
        for feed in self.device_feeds:
            pipeline.memory.remove(feed.staging)
        self.device_feeds = []
        (updater,) = self.updaters
        self.path = DeviceUpdates(
            self._link, pipeline, self.store.chunks, [], updater, self.division
        )

    def _path_of_feeds(self) -> StepFeeds:
        """Return one feed for each tier that has weights."""
        pipeline, chunks = self.store.pipeline, self.store.chunks
        feeds: dict[Tier, GradientFeed] = {}
        if any(param.tier is Tier.DISK for param in self._numbered):
            feeds[Tier.DISK] = DiskFeed(pipeline, chunks, self._numbered)
        feeds[Tier.HOST] = HostFeed(pipeline)
        for feed in self.device_feeds:
            feeds[Tier.DEVICE] = feed
        return StepFeeds(pipeline, chunks, feeds)

    def _divide(self) -> bool:
        """Give host and device their chunks; return whether these are others than before."""
        share = self.division.share
        if share == self._share:
            return False
        self._share = share
        host, device = self.path.divide(share)
        there = {n for chunk in device for n in chunk.owners}
        here = {n for chunk in host for n in chunk.owners}
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
        self._give_up()
        self.store = self._new_store(storage)
        if self._kept_alive:
            self.store.keep()
        self._by_id, self._numbered, self._connected = {}, [], 0
        self.device_feeds, self.updaters = [], []
        self.division = Division(self.offload_policy.update_on)
        self._share = None
        self.path = self._path_of_feeds()

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
        try:
            self._give_up()
        finally:
            self.store.close()

    def _give_up(self) -> None:
        """Forget the step that is open, if any, when nothing of it is under way on the device.

        What goes next is the memory that its copies and updates use; weights may be loaded anew.
        """
        self.path.abort()
        self._link.synchronize()

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
        param.tier = Tier.HOST if param.pager is None else Tier.DISK
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


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
