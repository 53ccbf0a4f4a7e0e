"""This rank's share of the machine's cores.

OMP_NUM_THREADS is ignored: torchrun sets it to 1 for every rank.

[Note: Bound ranks] If the launcher may use more cores than a rank, it has bound the rank (srun,
mpirun, torchrun's --numa-binding, numactl in a script). The rank's cores are then its share: they
are not divided again, and its threads are not moved.
"""

import os
from dataclasses import dataclass

import torch

from tensorstow.base.core_share import CoreShare, LocalRanks, part, share_cores
from tensorstow.base.cores import launcher_cores, process_cores, within_quota
from tensorstow.base.nodes import node_of_device, read_nodes, within
from tensorstow.io.local_ranks import local_ranks


@dataclass(frozen=True, slots=True)
class AcceleratorNodes:
    """The node of each device that the process sees; None if it is unknown."""

    nodes: tuple[int | None, ...]
    current: int
    """The device that this process uses."""


def usable_cores() -> int:
    """Return how many threads this rank's share of the cores carries, at least 1."""
    return share_here().threads


def fair_threads() -> int:
    """Return this rank's part of the cores, wherever they are."""
    local, total = local_ranks(), process_cores()
    if not is_bound():
        return part(total, local.count, local.rank)
    return min(total, part(within_quota(len(launcher_cores())), local.count, local.rank))


def is_bound() -> bool:
    """Return whether the launcher has bound this rank to some of its cores."""
    return launcher_cores() > os.sched_getaffinity(0)


def share_here(
    node: int | None = None,
    *,
    local: LocalRanks | None = None,
    devices: AcceleratorNodes | None = None,
) -> CoreShare:
    """Return this rank's share of the cores; on NUMA node ``node`` where one is named.

    ``local``: as if it were that rank, and not bound; ``devices``: where the accelerators are
    (default: those that the process uses already).
    """
    nodes = within(read_nodes(), frozenset(os.sched_getaffinity(0)))
    if local is None and is_bound():
        alone = LocalRanks(1, 0)
        # Without nodes a share names no cores, so the launcher's binding stays.
        return share_cores(() if node is None else nodes, fair_threads(), alone, near=node)
    total, local = process_cores(), local or local_ranks()
    if node is not None or len(nodes) < 2:
        return share_cores(nodes, total, local, near=node)
    accelerators = devices or accelerator_nodes()
    if accelerators is None:
        return share_cores(nodes, total, local)
    device_nodes = tuple(
        number for number in accelerators.nodes[: local.count] if number is not None
    )
    # Ranks have the devices of their numbers: each knows which others are on its node.
    if accelerators.current == local.rank and len(device_nodes) == local.count:
        return share_cores(nodes, total, local, devices=device_nodes)
    return share_cores(nodes, total, local, near=accelerators.nodes[accelerators.current])


def accelerator_nodes(*, initialise: bool = False) -> AcceleratorNodes | None:
    """Return the nodes of CUDA's or ROCm's devices; None if there is none, or it is not in use.

    ``initialise``: look also where the process has not used a device yet. A process that forks
    later must not.
    """
    is_in_use = bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
    if not is_in_use and not (initialise and torch.cuda.is_available()):
        return None
    nodes = tuple(
        _node_of(torch.cuda.get_device_properties(index))
        for index in range(torch.cuda.device_count())
    )
    return AcceleratorNodes(nodes, torch.cuda.current_device())


def _node_of(properties: object) -> int | None:
    """Return the node of the device with these properties of torch's."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    domain, bus, device = parts
    if domain is None or bus is None or device is None:
        return None
    return node_of_device(f"{domain:04x}:{bus:02x}:{device:02x}.0")
