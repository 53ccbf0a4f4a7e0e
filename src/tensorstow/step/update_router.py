"""Decides which chunks are updated on the host or the device, and routes gradients there."""

from collections.abc import Sequence

import torch

from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import reaches_device
from tensorstow.io import device_link
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import StateStore
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.device_updater import DeviceUpdater
from tensorstow.step.disk_feed import DiskFeed
from tensorstow.step.gradient_feed import GradientFeed, HostFeed, StepFeeds, StepPath
from tensorstow.step.host_weight import host_weight_bytes, make_host_weights, upload
from tensorstow.step.hybrid_step_path import HybridStepPath
from tensorstow.step.managed_param import ManagedParam
from tensorstow.step.optimizer_links import OptimizerLinks
from tensorstow.step.share_tuner import ShareTuner


class UpdateRouter:
    """Routes the gradients of one store's parameters to updates on the host or the device."""

    def __init__(
        self, offload_policy: OffloadPolicy, store: StateStore, links: OptimizerLinks
    ) -> None:
        """Begin with no parameters."""
        self._policy = offload_policy
        self._store = store
        self._links = links
        self._params: Sequence[ManagedParam] = ()
        self._connected = 0
        """How many of them are connected: they have host weights, and the step path serves them."""
        self.device_feeds: list[DeviceFeed] = []
        """At most one: if gradients of an accelerator's parameters are copied to the host."""
        self.updaters: list[DeviceUpdater] = []
        """At most one: if updates may run on the accelerator."""
        self.share_tuner = ShareTuner(offload_policy.update_on)
        self._share: float | None = None
        self.step_path: StepPath = self._path_of_feeds()
        """The interface through which a schedule takes its steps ([Note: Feeds])."""

    # --- as parameters come ---

    def connect(self, params: Sequence[ManagedParam]) -> None:
        """Serve ``params``, all of the store's by number; repeated if it failed before.

        Those on an accelerator get host weights, and the step path is replaced.
        """
        self._params = params
        new = params[self._connected :]
        if params and not new:
            return
        remote = [param for param in new if device_link.is_remote(param.parameter)]
        if remote:
            self._connect_device(remote)
        if not self.updaters:
            self.step_path = self._path_of_feeds()
        self._connected = len(params)

    def _connect_device(self, remote: Sequence[ManagedParam]) -> None:
        link, pipeline, chunks = self._links.weights, self._store.pipeline, self._store.chunks
        for used in (True, False):
            group = [param for param in remote if self._reads_host_weight(param) == used]
            block, host_weights = make_host_weights(
                [m.shard for m in group], link, [m.owner for m in group], pinned=used
            )
            pipeline.memory.append(block)
            self._links.blocks.add(block)
            for param, host_weight in zip(group, host_weights, strict=True):
                param.hold_on_device(host_weight)
        known = {param.number: param.on_host for param in self.on_device()}
        where, chosen = self._policy.update_on, self.share_tuner.chosen
        self.device_feeds = []
        if where != "device" and chosen != 1.0:
            feed = DeviceFeed(link, pipeline, chunks, known)
            self.device_feeds = [feed]
            pipeline.memory.append(feed.staging)
            self._links.blocks.add(feed.staging)
        if reaches_device(where) and chosen != 0.0:
            updater = DeviceUpdater(
                self._links.states, pipeline, chunks, known, self._store.streams_at
            )
            self.updaters = [updater]
            self._links.blocks.add(updater.tables)
            feeds, share_tuner = self.device_feeds, self.share_tuner
            self.step_path = HybridStepPath(link, pipeline, chunks, feeds, updater, share_tuner)
            before, self._share = self._share, None
            self._divide()
            if before is not None:
                self._share = before  # where it is another one now, refresh() fetches what moves
        else:
            self.updaters = []

    def _path_of_feeds(self) -> StepFeeds:
        """Return one feed for each tier that has weights."""
        pipeline, chunks = self._store.pipeline, self._store.chunks
        feeds: dict[Tier, GradientFeed] = {}
        if any(param.tier is Tier.DISK for param in self._params):
            feeds[Tier.DISK] = DiskFeed(pipeline, chunks, self._params)
        feeds[Tier.HOST] = HostFeed(pipeline)
        for feed in self.device_feeds:
            feeds[Tier.DEVICE] = feed
        return StepFeeds(pipeline, chunks, feeds)

    def on_device(self) -> list[ManagedParam]:
        """Return the parameters that are on an accelerator."""
        return [param for param in self._params if param.tier is Tier.DEVICE]

    def _reads_host_weight(self, param: ManagedParam) -> bool:
        """Return whether steps need the weight in host memory."""
        idle = self._policy.update_on == "device" and not self._policy.placement.durable
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
        whole = self._divide() or whole
        self._drop_side()
        self._links.fetch(m for m in self._params if whole or m.needs_host_weight)

    def _divide(self) -> bool:
        """Divide chunks between host and device; return whether that changed anything."""
        share = self.share_tuner.share
        if share == self._share:
            return False
        self._share = share
        host, device = self.step_path.divide(share)
        there = {n for chunk in device for n in chunk.owners}
        here = {n for chunk in host for n in chunk.owners}
        for param in self._params:
            param.updates_on_device = param.number in there
            param.updates_on_host = param.number in here
        return True

    def _drop_side(self) -> None:
        """Free the memory of the side that "auto" has not chosen."""
        chosen = self.share_tuner.chosen
        if chosen is None or not (self.device_feeds and self.updaters):
            return
        if chosen == 0.0:
            self.updaters = []
            self.step_path = self._path_of_feeds()
            return
        pipeline = self._store.pipeline
        for feed in self.device_feeds:
            pipeline.memory.remove(feed.staging)
        self.device_feeds = []
        (updater,) = self.updaters
        self.step_path = HybridStepPath(
            self._links.weights, pipeline, self._store.chunks, [], updater, self.share_tuner
        )

    def upload(self) -> None:
        """Copy all host weights to their parameters on an accelerator."""
        remote = self.on_device()
        torch.autograd.graph.increment_version([param.parameter for param in remote])
        upload((param.on_host for param in remote), self._links.weights)

    def give_up(self) -> None:
        """Drop the open step, if any, and wait for the device.

        Then the memory of its copies and updates can be freed, and weights can be loaded.
        """
        self.step_path.abort()
        self._links.weights.synchronize()
