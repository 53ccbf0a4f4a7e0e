"""This rank's share of the machine's cores.

OMP_NUM_THREADS is ignored: torchrun sets it to 1 for every rank.

[Note: Bound ranks] If the launcher may use more cores than a rank, it has bound the rank (srun,
mpirun, torchrun's --numa-binding, numactl in a script). The rank's cores are then its share: they
are not divided again, and its threads are not moved.
"""

import os

from tensorstow.base.core_share import CoreShare, LocalRanks, part, share_cores
from tensorstow.base.cores import launcher_cores, process_cores, within_quota
from tensorstow.base.nodes import read_nodes, within
from tensorstow.io.accelerator_nodes import AcceleratorNodes, accelerator_nodes
from tensorstow.io.local_ranks import local_ranks


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
    if accelerators.current == local.rank and len(device_nodes) == local.count:
        return share_cores(nodes, total, local, devices=device_nodes)
    return share_cores(nodes, total, local, near=accelerators.nodes[accelerators.current])
