"""Every front door makes the directory that it is given, no parent, and removes refused ones."""

import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow.base.errors import DirectoryError
from tensorstow.colossalai import HybridAdam
from tensorstow.tensornvme import DiskOffloader

SHM = Path("/dev/shm")


def stowed(place: Path) -> None:
    plan = tensorstow.Plan(parameters="disk", states="host")
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tensorstow.stow(model, tensorstow.AdamW, plan=plan, dir=place)[1].close()


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(5000))]


DOORS: dict[str, Callable[[Path], object]] = {
    "a run": lambda place: tensorstow.AdamW(parameters(), states="disk", dir=place),
    "scratch": lambda place: tensorstow.Adam(
        parameters(), states="disk", dir=place, durability="none"
    ),
    "several": lambda place: tensorstow.AdamW(
        parameters(), states="disk", dir=[place, place.with_name("b")]
    ),
    "any class": lambda place: tensorstow.StowedOptimizer(
        torch.optim.SGD, parameters(), momentum=0.9, lr=0.1, states="disk", dir=place
    ),
    "stow": stowed,
    "colossalai": lambda place: HybridAdam(
        parameters(), nvme_offload_fraction=1.0, nvme_offload_dir=place
    ),
    "tensornvme": DiskOffloader,
}


@pytest.mark.parametrize("door", DOORS)
def test_a_missing_directory_is_made_and_a_refused_one_removed(door: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    DOORS[door](place)
    assert place.is_dir()
    if not SHM.is_dir():
        return
    refused = SHM / f"tensorstow-{uuid.uuid4()}"
    with pytest.raises(DirectoryError, match="stays in RAM"):
        DOORS[door](refused)
    assert not refused.exists()


@pytest.mark.parametrize("door", DOORS)
def test_a_directory_whose_parent_is_missing_is_refused(door: str, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match=f"requested, and {tmp_path}/mvne does not exist"):
        DOORS[door](tmp_path / "mvne" / "run")
    assert not list(tmp_path.iterdir())
