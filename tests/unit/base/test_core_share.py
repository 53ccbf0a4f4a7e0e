"""Shares of cores, for many machines."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tensorstow.base.core_share import CoreShare, LocalRanks, part, share_cores, spread
from tensorstow.base.nodes import Node


@st.composite
def machines(draw: st.DrawFn) -> tuple[Node, ...]:
    """Draw some nodes with some cores each."""
    sizes = draw(st.lists(st.integers(1, 24), min_size=1, max_size=6))
    numbers = sorted(draw(st.sets(st.integers(0, 9), min_size=len(sizes), max_size=len(sizes))))
    ends = [sum(sizes[: k + 1]) for k in range(len(sizes))]
    return tuple(
        Node(n, tuple(range(end - size, end)))
        for n, end, size in zip(numbers, ends, sizes, strict=True)
    )


def even(nodes: int, cores: int) -> tuple[Node, ...]:
    """Return nodes of the same size."""
    return tuple(Node(n, tuple(range(n * cores, (n + 1) * cores))) for n in range(nodes))


def shares(nodes: tuple[Node, ...], ranks: int, total: int | None = None) -> list[CoreShare]:
    """Return the shares of all ranks."""
    total = total or sum(len(node.cores) for node in nodes)
    return [share_cores(nodes, total, LocalRanks(ranks, rank)) for rank in range(ranks)]


@given(st.integers(1, 500), st.integers(1, 100))
def test_parts_are_whole_and_the_first_have_what_is_left(total: int, ranks: int) -> None:
    parts = [part(total, ranks, rank) for rank in range(ranks)]
    assert sum(parts) == max(total, ranks)
    assert parts == sorted(parts, reverse=True)
    assert parts[0] - parts[-1] <= 1
    assert part(total, ranks, None) == parts[-1]


@given(st.integers(1, 64), st.integers(1, 100))
def test_on_one_node_nobody_is_restricted(cores: int, ranks: int) -> None:
    found = shares(even(1, cores), ranks)
    assert found == [CoreShare(part(cores, ranks, rank)) for rank in range(ranks)]
    assert found == shares((), ranks, cores)  # nor where the system tells of no nodes


@given(machines(), st.integers(1, 40), st.integers(1, 150))
def test_no_rank_has_more_than_its_part_of_the_machine_or_of_its_nodes(
    nodes: tuple[Node, ...], ranks: int, quota: int
) -> None:
    total = min(quota, sum(len(node.cores) for node in nodes))
    found = shares(nodes, ranks, total)
    assert all(1 <= f.threads <= part(total, ranks, rank) for rank, f in enumerate(found))
    assert sum(f.threads for f in found) <= max(total, ranks)
    by_number = {node.number: node for node in nodes}
    for number, node in by_number.items():
        there = [f for f in found if f.nodes == (number,)]
        assert sum(f.threads for f in there) <= max(len(node.cores), len(there))
    for f in found:
        assert f.cores == tuple(sorted(c for number in f.nodes for c in by_number[number].cores))
        assert f.threads <= max(1, len(f.cores)) or not f.nodes


@given(machines(), st.integers(1, 40))
def test_ranks_are_spread_over_nodes_in_order(nodes: tuple[Node, ...], ranks: int) -> None:
    groups = spread(nodes, ranks)
    assert len(groups) == ranks
    assert groups == sorted(groups, key=lambda group: group[0].number)
    if ranks < len(nodes):  # whole nodes, each of one rank
        assert [node for group in groups for node in group] == list(nodes)
        sizes = [len(group) for group in groups]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        return
    on = Counter(node.number for (node,) in groups)
    fewest = min(len(node.cores) / on[node.number] for node in nodes if on[node.number])
    # A rank that went elsewhere would not have more there than the worst off has now.
    assert all(len(node.cores) / (on[node.number] + 1) <= fewest for node in nodes)


@given(st.integers(2, 8), st.integers(1, 16), st.integers(1, 6))
def test_nodes_alike_have_as_many_ranks_each_and_every_core_is_used(
    nodes: int, cores: int, each: int
) -> None:
    found = shares(even(nodes, cores), nodes * each)
    assert [f.nodes for f in found] == [(rank // each,) for rank in range(nodes * each)]
    if cores % each == 0:
        assert [f.threads for f in found] == [cores // each] * len(found)


def test_some_machines_by_hand() -> None:
    assert [(f.threads, f.nodes) for f in shares(even(2, 8), 3)] == [
        (4, (0,)),
        (4, (0,)),
        (5, (1,)),
    ]
    assert [(f.threads, f.nodes) for f in shares(even(4, 8), 3)] == [
        (11, (0, 1)),
        (8, (2,)),
        (8, (3,)),
    ]
    assert shares(even(2, 8), 1) == [CoreShare(16)]
    assert [f.threads for f in shares(even(2, 8), 4, total=6)] == [2, 2, 1, 1]
    assert [f.threads for f in shares(even(2, 1), 5)] == [1] * 5


def test_a_named_node_is_taken() -> None:
    nodes = even(2, 8)
    mine = tuple(range(8, 16))
    assert share_cores(nodes, 16, LocalRanks(1, 0), near=1) == CoreShare(8, (1,), mine)
    # How many others are there is not known: as if they were spread evenly.
    assert share_cores(nodes, 16, LocalRanks(4, 0), near=1) == CoreShare(4, (1,), mine)
    assert share_cores(nodes, 16, LocalRanks(4, None), near=1) == CoreShare(4, (1,), mine)


def test_ranks_go_where_their_devices_are() -> None:
    nodes, devices = even(2, 8), (1, 1, 0, 1)
    found = [share_cores(nodes, 16, LocalRanks(4, r), devices=devices) for r in range(4)]
    assert [f.nodes for f in found] == [(1,), (1,), (0,), (1,)]
    assert [f.threads for f in found] == [3, 3, 4, 2]  # eight cores for three, and for one


def test_a_device_on_a_node_that_may_not_be_used_counts_for_nothing() -> None:
    nodes = even(2, 8)
    plain = share_cores(nodes, 16, LocalRanks(2, 1))
    assert share_cores(nodes, 16, LocalRanks(2, 1), devices=(0, 5)) == plain
    assert share_cores(nodes, 16, LocalRanks(2, 1), near=5) == plain


def test_a_rank_of_unknown_number_runs_anywhere() -> None:
    assert share_cores(even(2, 8), 15, LocalRanks(2, None)) == CoreShare(7)
