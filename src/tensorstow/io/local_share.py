"""This rank's share of the machine's cores.

OMP_NUM_THREADS is not asked: torchrun sets it to 1 for every rank.
"""

import os

from tensorstow.base.core_share import CoreShare, LocalRanks, share_cores
from tensorstow.base.cores import process_cores
from tensorstow.base.nodes import read_nodes, within
from tensorstow.io.accelerator_nodes import AcceleratorNodes, accelerator_nodes
from tensorstow.io.local_ranks import local_ranks


def usable_cores() -> int:
    """Return how many threads this rank's share of the cores carries, at least 1."""
    return share_here().threads


def share_here(
    node: int | None = None,
    *,
    local: LocalRanks | None = None,
    devices: AcceleratorNodes | None = None,
) -> CoreShare:
    """Return this rank's share of the cores; on NUMA node ``node`` where one is named.

    ``local``: as if it were that rank; ``devices``: where the accelerators are (default: those that
    the process uses already).
    """
    nodes = within(read_nodes(), frozenset(os.sched_getaffinity(0)))
    total, local = process_cores(), local or local_ranks()
    if node is not None or len(nodes) < 2:
        return share_cores(nodes, total, local, near=node)
    found = devices or accelerator_nodes()
    if found is None:
        return share_cores(nodes, total, local)
    known = tuple(number for number in found.nodes[: local.count] if number is not None)
    if found.current == local.rank and len(known) == local.count:
        return share_cores(nodes, total, local, devices=known)
    return share_cores(nodes, total, local, near=found.nodes[found.current])
