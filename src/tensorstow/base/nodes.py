"""The NUMA nodes of this machine, read from ``/sys``."""

from dataclasses import dataclass
from pathlib import Path

from tensorstow.base.cores import read_or_empty

_NODES = Path("/sys/devices/system/node")
_PCI = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node and its cores, in order."""

    number: int
    cores: tuple[int, ...]


def read_nodes(root: Path | None = None) -> tuple[Node, ...]:
    """Return the nodes that have cores, by number; none if the system lists none.

    ``root`` holds a folder for each node, with its ``cpulist``.
    """
    root = root or _NODES
    nodes = []
    for folder in root.glob("node[0-9]*"):
        number = folder.name.removeprefix("node")
        cores = parse_list(read_or_empty(folder / "cpulist"))
        if number.isdecimal() and cores:  # without cores: memory alone
            nodes.append(Node(int(number), cores))
    return tuple(sorted(nodes, key=lambda node: node.number))


def within(nodes: tuple[Node, ...], cores: frozenset[int]) -> tuple[Node, ...]:
    """Return ``nodes`` with those of their cores alone that are among ``cores``."""
    narrowed = (Node(n.number, tuple(c for c in n.cores if c in cores)) for n in nodes)
    return tuple(node for node in narrowed if node.cores)


def node_of_device(pci_address: str, root: Path | None = None) -> int | None:
    """Return the node that a PCI device is attached to, or None if it is unknown."""
    text = read_or_empty((root or _PCI) / pci_address / "numa_node").strip()
    return int(text) if text.isdecimal() else None  # "-1": not known


def parse_list(text: str) -> tuple[int, ...]:
    """Read the kernel's lists of numbers: ``0-3,8,10-11``."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            cores.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(cores))
