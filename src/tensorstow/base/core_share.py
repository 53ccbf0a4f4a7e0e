"""How the cores of a machine are divided among its ranks: arithmetic only.

[Note: Shares] Each rank has a part of the cores, whole ones: the first ranks have one more where
they do not divide evenly. On several NUMA nodes a rank stays on one of them, in the order of ranks,
as many on each as its cores allow; with fewer ranks than nodes it has several whole nodes. It never
has more threads than its part of the machine, nor than its part of its nodes: threads beyond the
cores wait for each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tensorstow.base.nodes import Node


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """This process among the ranks of its machine."""

    count: int = 1
    rank: int | None = 0
    """None if only their number is known."""


@dataclass(frozen=True, slots=True)
class CoreShare:
    """One rank's share of the machine's cores."""

    threads: int
    nodes: tuple[int, ...] = ()
    """The nodes whose cores its threads stay on; empty: they run anywhere."""
    cores: tuple[int, ...] = ()
    """Cores of those nodes, shared with the other ranks on them; empty: anywhere."""


def part(total: int, ranks: int, rank: int | None) -> int:
    """Return this rank's part of ``total``, at least 1; the first ranks get the remainder."""
    more = rank is not None and rank < total % ranks
    return max(1, total // ranks + more)


def share_cores(
    nodes: Sequence[Node],
    total: int,
    local: LocalRanks,
    near: int | None = None,
    devices: Sequence[int] = (),
) -> CoreShare:
    """Return the share of one rank in ``total`` cores' worth of time, on ``nodes``.

    ``near``: the number of the node that this rank wants; ``devices``: the nodes of all local
    ranks' accelerators, by rank, where they are known. Nodes that are not there do not count.
    """
    fair = part(total, local.count, local.rank)
    by_number = {node.number: node for node in nodes}
    mine: list[Node]
    turn: int | None
    if near is not None and near in by_number:
        # Where the others are is not known: as if they were spread evenly.
        mine, beside, turn = [by_number[near]], -(-local.count // len(nodes)), None
    elif local.rank is None or len(nodes) < 2:
        return CoreShare(fair)
    elif len(devices) == local.count and by_number.keys() >= set(devices):
        number = devices[local.rank]
        mine = [by_number[number]]
        beside, turn = devices.count(number), devices[: local.rank].count(number)
    else:
        groups = spread(nodes, local.count)
        mine = groups[local.rank]
        beside, turn = groups.count(mine), groups[: local.rank].count(mine)
    cores = tuple(sorted(core for node in mine for core in node.cores))
    # A rank that has all nodes is bound to none.
    if len(mine) == len(nodes):
        return CoreShare(fair)
    return CoreShare(
        min(fair, part(len(cores), beside, turn)), tuple(node.number for node in mine), cores
    )


def spread(nodes: Sequence[Node], ranks: int) -> list[list[Node]]:
    """Return the nodes of each rank: one, or several whole ones where there are fewer ranks."""
    if ranks < len(nodes):
        sizes = [part(len(nodes), ranks, rank) for rank in range(ranks)]
        ends = [sum(sizes[: rank + 1]) for rank in range(ranks)]
        return [list(nodes[end - size : end]) for end, size in zip(ends, sizes, strict=True)]
    # One rank after the other, to where most cores are left for it: no other way gives the rank
    # that has the fewest more.
    on = [0] * len(nodes)
    for _ in range(ranks):
        best = max(range(len(nodes)), key=lambda k: (len(nodes[k].cores) / (on[k] + 1), -k))
        on[best] += 1
    return [[node] for node, count in zip(nodes, on, strict=True) for _ in range(count)]
