"""The links of one optimizer to the accelerator of its parameters, and pinned memory for them."""

import weakref
from collections.abc import Iterable, Sequence

import torch

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import UpdateOn, keyword_of, reaches_device
from tensorstow.io import device_link
from tensorstow.io.device_link import DeviceLink, PlainLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.step.host_weight import refresh
from tensorstow.step.managed_param import ManagedParam


class OptimizerLinks:
    """The two links, on the CPU until there are parameters on an accelerator."""

    def __init__(self) -> None:
        self.weights: DeviceLink = PlainLink()
        """For gradients and weights."""
        self.states: DeviceLink = self.weights
        """For the states that are updated on the accelerator."""
        self._is_open = False
        self.blocks: weakref.WeakSet[PinnedBlock] = weakref.WeakSet()
        """Pinned host blocks used by both links."""

    def open(
        self,
        parameters: Sequence[torch.Tensor],
        served: Iterable[ManagedParam],
        update_on: UpdateOn | None,
    ) -> bool:
        """Open links to the accelerator of ``parameters``; return whether any are on one.

        ``served``: parameters on an accelerator that have states. Raises OptionError if parameters
        are on several accelerators, or on the host while ``update_on`` needs an accelerator.
        """
        remote = [p for p in parameters if device_link.is_remote(p)]
        devices = {p.device for p in (*(param.parameter for param in served), *remote)}
        if len(devices) > 1:
            names = " and ".join(sorted(map(str, devices)))
            message = (
                f"One optimizer got parameters on {names}, and its link goes to one"
                " accelerator. Make an optimizer for the parameters of each."
            )
            raise OptionError(message)
        if reaches_device(update_on) and len(remote) < len(parameters):
            message = (
                f"{len(parameters) - len(remote)} of {len(parameters)} parameters are in host"
                f" memory, and {keyword_of(update_on)} was requested, which updates parameters on"
                ' an accelerator. Move the model to it first, or use update_on="host".'
            )
            raise OptionError(message)
        if remote and not self._is_open:
            self.weights, self._is_open = device_link.open_link(remote[0].device), True
            # A copy of states that waits for its update must not delay gradients that are ready.
            self.states = self.weights.second_link()
        return bool(remote)

    def pin(self, nbytes: int) -> PinnedBlock:
        """Return memory that the accelerator copies from and to, for states."""
        if not self._is_open:
            message = "Pinned memory for states was requested before a link was open."
            raise StowError(message)
        block = PinnedBlock(nbytes, self.weights.device, self.weights.synchronize)
        self.blocks.add(block)
        return block

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of ``blocks`` that are pinned."""
        return sum(block.pinned_bytes for block in self.blocks)

    def fetch(self, params: Iterable[ManagedParam]) -> None:
        """Copy to the host those weights of ``params`` that others wrote on the accelerator."""
        refresh((m.on_host for m in params if m.tier is Tier.DEVICE), self.weights)
