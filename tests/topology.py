"""Made-up NUMA nodes, as the system tells of real ones."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from tensorstow.base import cores as base_cores
from tensorstow.base import nodes


def make_nodes(root: Path, cores: Mapping[int, str]) -> Path:
    """Write a folder for each node with the list of its cores; return what holds them."""
    for number, text in cores.items():
        folder = root / f"node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{text}\n", encoding="ascii")
    return root


def pretend_nodes(
    monkeypatch: pytest.MonkeyPatch, root: Path, cores: Mapping[int, str], usable: int
) -> None:
    """Let this process see made-up nodes, and be allowed the first ``usable`` of their cores."""
    monkeypatch.setattr(nodes, "_NODES", make_nodes(root, cores))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(usable)))
    monkeypatch.setattr(base_cores, "quota_cores", lambda _: None)
