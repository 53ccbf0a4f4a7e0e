import os
from pathlib import Path

import pytest

from tensorstow.base.nodes import Node, node_of_device, read_nodes, within
from topology import make_nodes


def test_nodes_come_by_number_with_their_cores(tmp_path: Path) -> None:
    make_nodes(tmp_path, {10: "8", 0: "0-1,4", 2: "2,3,5-7"})
    (tmp_path / "has_cpu").write_text("0,2,10\n", encoding="ascii")
    (tmp_path / "node_of_no_number").mkdir()
    assert read_nodes(tmp_path) == (
        Node(0, (0, 1, 4)),
        Node(2, (2, 3, 5, 6, 7)),
        Node(10, (8,)),
    )


def test_a_node_without_cores_is_memory_alone(tmp_path: Path) -> None:
    assert read_nodes(make_nodes(tmp_path, {0: "0-3", 1: ""})) == (Node(0, (0, 1, 2, 3)),)


def test_a_system_that_tells_of_none(tmp_path: Path) -> None:
    assert read_nodes(tmp_path / "absent") == ()


def test_this_machine_has_all_cores_that_this_process_may_use_on_nodes() -> None:
    cores = {core for node in read_nodes() for core in node.cores}
    if not cores:
        pytest.skip("no NUMA nodes are told here")
    assert cores >= os.sched_getaffinity(0)


def test_only_some_cores_may_be_used() -> None:
    nodes = (Node(0, (0, 1)), Node(1, (2, 3)), Node(2, (4, 5)))
    assert within(nodes, frozenset({1, 4, 5})) == (Node(0, (1,)), Node(2, (4, 5)))


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_the_node_of_a_device(text: str, node: int | None, tmp_path: Path) -> None:
    device = tmp_path / "0000:3b:00.0"
    device.mkdir()
    (device / "numa_node").write_text(text, encoding="ascii")
    assert node_of_device("0000:3b:00.0", tmp_path) == node
    assert node_of_device("0000:af:00.0", tmp_path) is None
