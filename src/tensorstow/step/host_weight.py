"""The copy in host memory of a weight on an accelerator: the kernel writes the new one there.

[Note: Mirrors] A mirror is the newer of the two from the update of its parameter until the new
weight has gone up, and again when others have written the parameter it is the older one, which its
version and address tell. It has the parameter's dtype: under split states it is the upper half of
the master, and for fp32 parameters it is the master.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tensorstow.base.sizes import round_up
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.tensors.dtensor import flat, in_order, order_of

_ALIGN = 128
Stamp = tuple[int, ...]


@dataclass(eq=False, slots=True)
class HostWeight:
    """The weight of one parameter in host memory."""

    parameter: torch.Tensor
    host: torch.Tensor
    """In the parameter's dtype, and in the order of its memory."""
    owner: torch.Tensor
    """What users know the parameter as; itself, or the DTensor whose shard it is."""
    stamp: Stamp | None = None
    """What the parameter's was when both were the same; None: never."""

    @property
    def is_stale(self) -> bool:
        """Return whether others wrote the parameter since."""
        return self.stamp != stamp_of(self.parameter, self.owner)

    def remember(self) -> None:
        """Take the mirror for what the parameter is, or is going to be."""
        self.stamp = stamp_of(self.parameter, self.owner)

    def leave_behind(self) -> None:
        """Take it for older than the parameter, which was updated on its device."""
        self.stamp = None


def stamp_of(parameter: torch.Tensor, owner: torch.Tensor | None = None) -> Stamp:
    """Return version counters and address: others, if somebody wrote it or exchanged its data.

    Who writes a DTensor counts for it alone, not for its shard.
    """
    whole = parameter if owner is None else owner
    return parameter._version, parameter.data_ptr(), whole._version  # noqa: SLF001


def host_weight_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the host memory that the mirrors of ``parameters`` take."""
    return sum(round_up(p.numel() * p.element_size(), _ALIGN) for p in parameters)


def make_host_weights(
    parameters: Sequence[torch.Tensor],
    link: DeviceLink,
    owners: Sequence[torch.Tensor] | None = None,
    *,
    pinned: bool = True,
) -> tuple[PinnedBlock, list[HostWeight]]:
    """Return mirrors that hold nothing yet, in one block of memory.

    ``owners``: the DTensors whose shards ``parameters`` are; None: they are their own. Not
    ``pinned``: no page is there before it is touched, for mirrors that hardly anybody looks at.
    """
    device = link.device if pinned else torch.device("cpu")
    block = PinnedBlock(host_weight_bytes(parameters), device, link.synchronize)
    host_weights = []
    at = 0
    for parameter, owner in zip(parameters, owners or parameters, strict=True):
        shape = in_order(parameter, order_of(parameter)).shape
        host = block.tensor(at, parameter.numel(), parameter.dtype).view(shape)
        host_weights.append(HostWeight(parameter, host, owner))
        at += host_weight_bytes([parameter])
    return block, host_weights


def refresh(host_weights: Iterable[HostWeight], link: DeviceLink) -> None:
    """Fetch the weights that others wrote; return when they are here."""
    stale = [m for m in host_weights if m.is_stale]
    if not stale:
        return
    pairs = [(flat(m.host), flat(m.parameter)) for m in stale]
    link.d2h(pairs, [link.record_event()]).synchronize()
    for host_weight in stale:
        host_weight.remember()


def deliver(host_weights: Iterable[HostWeight], link: DeviceLink) -> None:
    """Let every parameter be what its mirror is, for whatever the caller's stream does next."""
    pairs = [(flat(m.parameter), flat(m.host)) for m in host_weights]
    if pairs:
        link.join(link.h2d(pairs, [link.record_event()]))
