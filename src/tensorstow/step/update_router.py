"""Decides which chunks are updated on the host or the device, and routes their gradients."""

from collections.abc import Sequence

import torch

from tensorstow.base.tiers import Tier
from tensorstow.io import device_link
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import StateStore
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.device_updater import DeviceUpdater
from tensorstow.step.disk_feed import DiskFeed
from tensorstow.step.gradient_feed import GradientFeed, HostFeed, StepFeeds
from tensorstow.step.host_weight import host_weight_bytes, make_host_weights, upload
from tensorstow.step.managed_param import ManagedParam
from tensorstow.step.optimizer_links import OptimizerLinks
from tensorstow.step.share_tuner import chunks_of_device, elements_of, share_tuner_of
from tensorstow.tensors.dtensor import computes_on_accelerator


class UpdateRouter:
    """Routes the gradients of one store's parameters to updates on the host or the device."""

    def __init__(
        self, offload_policy: OffloadPolicy, store: StateStore, links: OptimizerLinks
    ) -> None:
        self._policy = offload_policy
        self._store = store
        self._links = links
        self._params: Sequence[ManagedParam] = ()
        self._connected = 0
        """How many of them are connected: they have host weights, and feeds serve them."""
        self.device_feeds: list[DeviceFeed] = []
        """One feed if the host updates chunks of parameters on an accelerator, else none."""
        self.updaters: list[DeviceUpdater] = []
        """One updater if updates may run on the accelerator, else none."""
        self.share_tuner = share_tuner_of(offload_policy.update_on)
        self._device_alone = not self.share_tuner.needs_host
        self._share: float | None = None
        self.device_share = 0.0
        """Share of the elements that the device updates."""
        self.step_path = self._path_of_feeds()
        """The interface through which a schedule takes its steps ([Note: Feeds])."""

    # --- connecting parameters ---

    def connect(self, params: Sequence[ManagedParam]) -> None:
        """Serve ``params``, all of the store's by number; call it again if it failed.

        Those on an accelerator get host weights, and the feeds are replaced.
        """
        self._params = params
        new = params[self._connected :]
        if params and not new:
            return
        remote = [param for param in new if device_link.is_remote(param.parameter)]
        if remote:
            self._connect_device(remote)
        self.step_path = self._path_of_feeds()
        # Last: after an error the next call connects the same parameters again.
        self._connected = len(params)

    def _connect_device(self, remote: Sequence[ManagedParam]) -> None:
        link, pipeline, chunks = self._links.weights, self._store.pipeline, self._store.chunks
        # Weights that steps read are pinned; pages of the others are allocated when touched.
        for used in (True, False):
            group = [param for param in remote if self._reads_host_weight(param) == used]
            block, host_weights = make_host_weights(
                [m.shard for m in group], link, [m.owner for m in group], pinned=used
            )
            # Native threads may use the block until the pipeline is closed.
            pipeline.memory.append(block)
            self._links.blocks.add(block)
            for param, host_weight in zip(group, host_weights, strict=True):
                param.host_weight, param.tier = host_weight, Tier.DEVICE
        host_weight_of = {param.number: param.on_host for param in self.on_device()}
        self.device_feeds, self.updaters = [], []
        if self.share_tuner.needs_host:
            feed = DeviceFeed(link, pipeline, chunks, host_weight_of)
            self.device_feeds = [feed]
            pipeline.memory.append(feed.staging)
            self._links.blocks.add(feed.staging)
        if self.share_tuner.needs_device:
            updater = DeviceUpdater(
                self._links.states, pipeline, chunks, host_weight_of, self._store.streams_at
            )
            self.updaters = [updater]
            self._links.blocks.add(updater.tables)
            # Without a share the chunks are divided anew, those of new parameters too.
            before, self._share = self._share, None
            self._divide()
            if before is not None:
                self._share = before  # if the share differs now, refresh() divides and fetches

    def _path_of_feeds(self) -> StepFeeds:
        """Return the steps of one feed for each tier that has weights, two if both sides update."""
        pipeline, chunks = self._store.pipeline, self._store.chunks
        on_disk = any(param.tier is Tier.DISK for param in self._params)
        feeds: dict[Tier, Sequence[GradientFeed]] = {
            Tier.DISK: [DiskFeed(pipeline, chunks, self._params)] if on_disk else [],
            Tier.HOST: [HostFeed(pipeline)],
            Tier.DEVICE: [*self.updaters, *self.device_feeds],
        }
        on_accelerator = any(computes_on_accelerator(param.owner) for param in self._params)
        return StepFeeds(pipeline, chunks, feeds, self.share_tuner, on_accelerator=on_accelerator)

    def on_device(self) -> list[ManagedParam]:
        """Return the parameters that are on an accelerator."""
        return [param for param in self._params if param.tier is Tier.DEVICE]

    def _reads_host_weight(self, param: ManagedParam) -> bool:
        """Return whether steps need the weight in host memory."""
        idle = self._device_alone and not self._policy.placement.durable
        return not (idle and param.family.dtype == torch.float32)

    def host_weight_bytes(self) -> int:
        """Return the bytes of the host weights that steps use."""
        return host_weight_bytes(
            param.parameter for param in self.on_device() if self._reads_host_weight(param)
        )

    # --- between steps ---

    def refresh(self, *, whole: bool = True) -> None:
        """Divide chunks between the sides, and copy weights that are newer on the device.

        Called when a step begins. If not ``whole``, only the weights that a step without a commit
        reads.
        """
        if not (self.updaters or self.device_feeds):  # all parameters are in host memory
            return
        whole = self._divide() or whole
        self._drop_side()
        self._links.fetch(m for m in self._params if whole or m.needs_host_weight)

    def _divide(self) -> bool:
        """Divide chunks between host and device; return whether that changed anything."""
        share = self.share_tuner.share
        if share == self._share:
            return False
        self._share = share
        chunks = self._store.chunks
        device = chunks_of_device(chunks, share) if self.updaters else []
        numbers = {chunk.number for chunk in device}
        host = [chunk for chunk in chunks if chunk.number not in numbers]
        for updater in self.updaters:
            self._store.pipeline.handle.live().set_caller_chunks(sorted(numbers))
            updater.serve(device)
        for feed in self.device_feeds:
            feed.serve(host)
        self.device_share = elements_of(device) / max(elements_of(chunks), 1)
        device_numbers = {n for chunk in device for n in chunk.owners}
        host_numbers = {n for chunk in host for n in chunk.owners}
        for param in self._params:
            param.updates_on_device = param.number in device_numbers
            param.updates_on_host = param.number in host_numbers
        return True

    def _drop_side(self) -> None:
        """Free the memory of the side that "auto" has not chosen."""
        if not self.share_tuner.needs_device and self.updaters:
            self.updaters = []
        elif not self.share_tuner.needs_host and self.device_feeds:
            for feed in self.device_feeds:
                self._store.pipeline.memory.remove(feed.staging)
            self.device_feeds = []
        else:
            return
        self.step_path = self._path_of_feeds()

    def upload(self) -> None:
        """Copy all host weights to their parameters on an accelerator."""
        remote = self.on_device()
        # The copies go through ``.data``, which changes no version counter.
        torch.autograd.graph.increment_version([param.parameter for param in remote])
        upload((param.on_host for param in remote), self._links.weights)

    def give_up(self) -> None:
        """Drop the open step, if any, and wait for the device.

        After that the memory of its copies and updates can be freed, and weights can be loaded.
        """
        self.step_path.abort()
        self._links.weights.synchronize()
