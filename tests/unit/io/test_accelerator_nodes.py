from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tensorstow.base import nodes
from tensorstow.io import accelerator_nodes as module
from tensorstow.io.accelerator_nodes import AcceleratorNodes, accelerator_nodes

H100 = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
OTHER = SimpleNamespace(pci_domain_id=1, pci_bus_id=0xAF, pci_device_id=2)


def pretend(monkeypatch: pytest.MonkeyPatch, *, is_in_use: bool, current: int = 0) -> None:
    """Have three devices, the last of a kind that has no address."""
    devices = [H100, OTHER, SimpleNamespace()]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_in_use)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(devices))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_device_properties", devices.__getitem__)


def test_each_device_has_a_node_where_the_system_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for address, node in {"0000:3b:00.0": "1", "0001:af:02.0": "0"}.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(f"{node}\n", encoding="ascii")
    monkeypatch.setattr(nodes, "_PCI", tmp_path)
    pretend(monkeypatch, is_in_use=True, current=1)
    assert accelerator_nodes() == AcceleratorNodes((1, 0, None), current=1)


def test_a_device_that_is_not_in_use_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, is_in_use=False)
    assert accelerator_nodes() is None
    assert accelerator_nodes(initialise=True) is not None


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert module.accelerator_nodes(initialise=True) is None
