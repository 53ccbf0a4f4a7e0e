"""``ParamTable``: every parameter that has states, by number, and the store of their states."""

import logging
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from tensorstow.base.errors import PoisonedError
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import UpdateOn, reaches_device, refuse_delayed
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import RESIDENT_CAPACITY, Family, OptionalStates, RowChunks
from tensorstow.states.memory import StateMemory
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import ChunkStorage, StateStore
from tensorstow.states.stored import StoreStorage
from tensorstow.states.stored_chunks import StoredChunk
from tensorstow.states.traffic import Traffic
from tensorstow.step.managed_param import ManagedParam, in_shape_of
from tensorstow.step.optimizer_links import OptimizerLinks
from tensorstow.step.update_router import UpdateRouter
from tensorstow.step.validation import refuse_sharded_since
from tensorstow.tensors.dtensor import layout_of, order_of, pager_of, shard_of
from tensorstow.tensors.placeholder import StateOnDisk

logger = logging.getLogger("tensorstow")

OnGradient = Callable[[torch.Tensor], None]


class GradientHooks:
    """Hooks on parameters, removed with this object."""

    def __init__(self, on_gradient: OnGradient) -> None:
        """Begin with none; ``on_gradient`` is called with the parameter."""
        self._on_gradient = on_gradient
        self._handles: list[Any] = []
        self._frozen: list[torch.Tensor] = []
        # A finalizer that refers to this object would keep it alive.
        weakref.finalize(self, _remove, self._handles)

    def add(self, parameter: torch.Tensor) -> None:
        """Register a hook on ``parameter``; if it is frozen, ``update`` does so once it is not."""
        self._frozen.append(parameter)
        self.update()

    def update(self) -> None:
        """Register hooks on parameters that have been unfrozen."""
        still: list[torch.Tensor] = []
        for parameter in self._frozen:
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles.append(register(self._on_gradient))
            else:
                still.append(parameter)
        self._frozen = still

    def clear(self) -> None:
        """Remove all hooks. Idempotent."""
        _remove(self._handles)
        self._frozen.clear()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


class ParamTable:
    """The parameters of one optimizer, the store of their states, and their update paths."""

    def __init__(self, offload_policy: OffloadPolicy, on_gradient: OnGradient) -> None:
        """Begin with no parameters; raise for a directory that cannot hold states.

        ``on_gradient`` is called with each parameter whose gradient autograd has accumulated, if
        any states move.
        """
        self.offload_policy = offload_policy
        # Keyed by id: hashing a tensor calls into Python, a hundred times a step. The values hold
        # the parameters, so no id is used twice.
        self._by_id: dict[int, ManagedParam] = {}
        self._numbered: list[ManagedParam] = []
        self._hooks = GradientHooks(on_gradient)
        self.links = OptimizerLinks()
        self._kept_alive = False
        self.row_sizes: Mapping[int, int] = {}
        """Elements of a row, by the ids of parameters whose chunks are cut between rows."""
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
        self.update_router = UpdateRouter(offload_policy, self.store, self.links)

    def _new_store(self, storage: ChunkStorage | None) -> StateStore:
        # Weakly: the store must go with its optimizer, not when the garbage collector runs.
        weight_of = weakref.WeakMethod(self.weight)

        def weight(number: int) -> torch.Tensor:
            method = weight_of()
            if method is None:
                message = "The optimizer of these states is gone."
                raise PoisonedError(message)
            return method(number)

        offload_policy = self.offload_policy
        return StateStore(
            offload_policy.placement,
            offload_policy.policy,
            weight,
            storage,
            offload_policy.timing,
            # The accelerator copies states that it updates from the ring and to it.
            self.links.pin if reaches_device(offload_policy.update_on) else None,
        )

    def weight(self, number: int) -> torch.Tensor:
        """Return a parameter's weight in host memory; a stale host weight is refreshed first.

        Returns a copy if the weight is on disk.
        """
        param = self._numbered[number]
        self.links.fetch([param])
        with param.held():  # the pin ends on return, so a weight on disk is copied
            return param.weight.clone() if param.tier is Tier.DISK else param.weight

    def traffic(self) -> Traffic:
        """Return the bytes of states moved so far, and over the link to an accelerator."""
        moved = self.store.pipeline.counters.traffic()
        link, share = self.links.weights, self.update_router.device_share
        return replace(
            moved, bytes_down=link.bytes_down, bytes_up=link.bytes_up, device_share=share
        )

    def memory(self) -> StateMemory:
        """Return the bytes of states and buffers, by place."""
        return replace(
            self.update_router.step_path.counted_in(self.store.memory()),
            host_weight_bytes=self.update_router.host_weight_bytes(),
            pinned_bytes=self.links.pinned_bytes,
        )

    # --- look-up ---

    def is_updated(self, parameter: torch.Tensor) -> bool:
        """Return whether a read of ``parameter`` would wait for no update."""
        param = self.find(parameter)
        return param is None or not self.update_router.step_path.needs(param)

    def find(self, parameter: torch.Tensor) -> ManagedParam | None:
        """Return the entry of ``parameter``, or None."""
        return self._by_id.get(id(parameter))

    def get(self, parameter: torch.Tensor) -> ManagedParam:
        """Return the entry of ``parameter``; raise KeyError if there is none."""
        return self._by_id[id(parameter)]

    def by_id(self, identity: int) -> ManagedParam | None:
        """Return the entry of the parameter with this ``id``, or None."""
        return self._by_id.get(identity)

    def all(self) -> Sequence[ManagedParam]:
        """Return every entry, by number."""
        return self._numbered

    def differ(self, optional: Mapping[int, OptionalStates]) -> bool:
        """Return whether a parameter has other states than its group wants."""
        managed = self._by_id.items()
        return any(optional.get(i, m.family.optional) != m.family.optional for i, m in managed)

    # --- growth ---

    def attach(
        self, parameters: Iterable[torch.Tensor], optional: Mapping[int, OptionalStates]
    ) -> None:
        """Create states for those of ``parameters`` that have none.

        ``optional``: for every parameter of the optimizer, by id, its states beyond both moments.
        """
        new = [p for p in parameters if id(p) not in self._by_id]
        if any(layout_of(p) is not None for p in new):
            refuse_delayed(self.offload_policy.overlap, "with sharded parameters")
        self._hooks.update()
        if self._by_id and self._by_id.keys().isdisjoint(optional):
            refuse_sharded_since(new, self.offload_policy)
            self.renew()  # every parameter was replaced by another, as accelerate does
        # A call that has failed may have created states and connected none.
        if not new and self._by_id:
            self.update_router.connect(self._numbered)
            return
        # Choose chunks for the states of new parameters, and create them.
        shards = [shard_of(p) for p in new]
        offload_policy = self.offload_policy
        families = [offload_policy.family(p.dtype, optional[id(p)]) for p in new]
        # Copies over a link go by chunk, and updates during forward or backward start when a chunk
        # is complete. In both cases chunks in RAM are as small as others.
        is_linked = self.links.open(
            shards, self.update_router.on_device(), offload_policy.update_on
        )
        capacity = RESIDENT_CAPACITY
        if is_linked:
            capacity = offload_policy.policy.linked_chunk
        elif offload_policy.timing.is_overlapped:
            capacity = offload_policy.policy.chunk
        sizes = [s.numel() for s in shards]
        # All weights of a chunk are in memory at once, so each pager has chunks of its own.
        chunk_groups: list[Hashable] = [id(pager_of(p)) for p in new]
        for index, (parameter, family) in enumerate(zip(new, families, strict=True)):
            row = self.row_sizes.get(id(parameter))
            if row is not None:
                largest = offload_policy.policy.chunk
                chunk_groups[index] = RowChunks.of(family, sizes[index], row, largest, index)
        numbers = self.store.extend(sizes, families, capacity, chunk_groups)
        for parameter, shard, number, family in zip(new, shards, numbers, families, strict=True):
            states = self.store.views(number)
            self._add(parameter, number, family, in_shape_of(shard, states))
        self.update_router.connect(self._numbered)

    def restore(
        self,
        parameters: Sequence[torch.Tensor],
        families: Sequence[Family],
        chunks: Sequence[Chunk],
        adopt: Callable[[], Sequence[StoredChunk]],
        update_on: UpdateOn | None,
    ) -> None:
        """Replace all parameters by ``parameters``, with states from a commit.

        ``adopt`` takes over each chunk's bytes on disk, after the old ones have been released.
        ``update_on``: where to update from now on; None: as before.
        """
        if update_on is not None:
            self.offload_policy = replace(self.offload_policy, update_on=update_on)
        self.renew()
        shards = [shard_of(p) for p in parameters]
        self.links.open(shards, (), self.offload_policy.update_on)
        sizes = [s.numel() for s in shards]
        by_rows = [n for n, p in enumerate(parameters) if id(p) in self.row_sizes]
        self.store.restore(sizes, families, chunks, adopt(), by_rows)
        for number, (parameter, family) in enumerate(zip(parameters, families, strict=True)):
            self._add(parameter, number, family)
        self.update_router.connect(self._numbered)
        for param in self.update_router.on_device():
            param.on_host.remember()  # the caller writes the weights to it next

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
        if self.offload_policy.moving or self.offload_policy.timing.in_backward:
            self._hooks.add(parameter)

    # --- the store ---

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
        self._hooks.clear()
        self.update_router.give_up()
        self.store = self._new_store(storage)
        if self._kept_alive:
            self.store.keep()
        self._by_id, self._numbered = {}, []
        self.update_router = UpdateRouter(self.offload_policy, self.store, self.links)

    def outlive_finalizers(self) -> None:
        """Keep the store from closing itself before ``close`` or ``abandon``."""
        self._kept_alive = True
        self.store.keep()

    def abandon(self) -> None:
        """Drop the store without closing it: a forked child must not close it."""
        self.store.abandon()

    def close(self) -> None:
        """Drop states, buffers, files and hooks. Idempotent."""
        self._hooks.clear()
        try:
            self.update_router.give_up()
        finally:
            self.store.close()
