"""Made-up NUMA nodes, as the system tells of real ones."""

from collections.abc import Mapping
from pathlib import Path


def make_nodes(root: Path, cores: Mapping[int, str]) -> Path:
    """Write a folder for each node with the list of its cores; return what holds them."""
    for number, text in cores.items():
        folder = root / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n", encoding="ascii")
    return root
