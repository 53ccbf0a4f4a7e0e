"""Copies in host memory of weights on an accelerator, which the host kernel updates.

[Note: Host weights] A host weight is newer than its parameter from the update until the new weight
is copied to the device. It is stale after the user has written the parameter, which shows in the
parameter's version counter and address. It has the parameter's dtype: under split states it is the
upper half of the master, and for fp32 parameters it is the master.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from tensorstow.base.sizes import round_up
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.tensors.dtensor import Stamp, flat, in_order, order_of, stamp_of

_ALIGN = 128


@dataclass(eq=False, slots=True)
class HostWeight:
    """The weight of one parameter in host memory."""

    parameter: torch.Tensor
    host: torch.Tensor
    """The elements, in the parameter's dtype and in the order of its memory."""
    owner: torch.Tensor
    """The user's parameter: ``parameter`` itself, or the DTensor whose shard it is."""
    stamp: Stamp | None = None
    """``stamp_of`` the parameter when both were equal; None: never."""

    @property
    def is_stale(self) -> bool:
        """Return whether others wrote the parameter since ``remember``."""
        return self.stamp != stamp_of(self.parameter, self.owner)

    def remember(self) -> None:
        """Mark the copy as equal to the parameter, now or when copies in flight are complete."""
        self.stamp = stamp_of(self.parameter, self.owner)

    def mark_stale(self) -> None:
        """Mark the copy as stale: the parameter was updated on its device."""
        self.stamp = None


def host_weight_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the host memory that host weights of ``parameters`` take."""
    return sum(round_up(p.numel() * p.element_size(), _ALIGN) for p in parameters)


def make_host_weights(
    parameters: Sequence[torch.Tensor],
    link: DeviceLink,
    owners: Sequence[torch.Tensor] | None = None,
    *,
    pinned: bool = True,
) -> tuple[PinnedBlock, list[HostWeight]]:
    """Allocate host weights, not yet filled, in one block of memory.

    ``owners``: the DTensors whose shards ``parameters`` are; None: the parameters themselves. If
    not ``pinned``, pages are allocated when touched: for host weights that are seldom read.
    """
    # A block for the CPU is not pinned.
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
    """Copy parameters that others wrote to their host weights; return when they are copied."""
    stale = [m for m in host_weights if m.is_stale]
    if not stale:
        return
    pairs = [(flat(m.host), flat(m.parameter)) for m in stale]
    # The copies wait for writes that the caller's stream has yet to make.
    link.d2h(pairs, [link.record_event()]).synchronize()
    for host_weight in stale:
        host_weight.remember()


def upload(host_weights: Iterable[HostWeight], link: DeviceLink) -> None:
    """Copy host weights to their parameters; the caller's stream waits for the copies."""
    pairs = [(flat(m.parameter), flat(m.host)) for m in host_weights]
    if pairs:
        # The copies wait for what the caller's stream still computes with the old weights.
        link.join(link.h2d(pairs, [link.record_event()]))
