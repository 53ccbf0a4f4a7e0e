"""Activations where a plan says: the bits, the memory against a closed form, the refusals."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from models import FeedForward, Vectors
from tensorstow import AdamW, Plan, stow
from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.fsdp.placed_activations import PlacedActivations
from tensorstow.fsdp.traced_activations import Peaks
from tensorstow.optim.stowed_adam import StowedAdam

WIDTH, ROWS, BLOCKS = 128, 96, 4
BLOCK = 4 * ROWS * WIDTH
"""Bytes of a block's input. It saves that, the norm's output, and two of four times the width."""
SAVED = 10 * BLOCK
SMALL = 2 * 4 * ROWS
"""Of each row the norm's mean and reciprocal deviation: they stay."""
PLACED = {
    "recompute": {"activations": "recompute"},
    "disk": {"activations": "disk", "activation_ram_budget": 0},
    "mixed": {
        "activations": "disk",
        "activation_units": {"0": "keep", "2": "recompute"},
        "activation_ram_budget": "256KiB",
    },
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(FeedForward(WIDTH) for _ in range(BLOCKS)))


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def train(model: nn.Module, optimizer: StowedAdam) -> list[torch.Tensor]:
    for step in range(2):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    return [p.detach().clone() for p in model.state_dict().values()]


def part_of(optimizer: StowedAdam) -> PlacedActivations:
    (part,) = [p for p in optimizer._parts() if isinstance(p, PlacedActivations)]
    return part


SCRATCH = partial(AdamW, lr=1e-2, durability="none")
"""Does not commit: the directory is for scratch files."""


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(states="disk", overlap="backward"), Plan("disk", "host", overlap="backward")],
    ids=["in memory", "beside backward", "on disk"],
)
def test_weights_are_those_of_keeping_them(tmp_path: Path, plan: Plan, placed: str) -> None:
    found = []
    for each in (plan, plan.but(**PLACED[placed])):
        on_disk = "disk" in {each.parameters, each.states, *each.activation_placements}
        model, optimizer = stow(net(), SCRATCH, plan=each, dir=tmp_path if on_disk else None)
        with optimizer:
            found.append(train(model, optimizer))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({}, BLOCKS * (SAVED + SMALL)),
        ({"activations": "recompute"}, BLOCKS * BLOCK),
        ({"activations": "disk", "activation_ram_budget": 0}, BLOCKS * SMALL),
        (
            {"activations": "disk", "activation_ram_budget": 8 * BLOCK},
            8 * BLOCK + BLOCKS * SMALL,
        ),
        (PLACED["mixed"] | {"activation_ram_budget": 0}, SAVED + BLOCK + 3 * SMALL),
    ],
)
def test_memory_between_forward_and_backward_is_the_closed_form(
    tmp_path: Path, given: dict[str, object], most: int
) -> None:
    plan = Plan(**given)
    on_disk = "disk" in plan.activation_placements
    model, optimizer = stow(net(), SCRATCH, plan=plan, dir=tmp_path if on_disk else None)
    with optimizer, Peaks(model) as peaks:
        loss = loss_of(model, 0)
        held = peaks.held - peaks._fixed - BLOCK - loss.nbytes  # the model's output, which is saved
        assert most - 5 * BLOCK * bool(given.get("activation_ram_budget")) <= held <= most
        loss.backward()


def test_closing_takes_the_hooks_off(tmp_path: Path) -> None:
    model, optimizer = stow(net(), SCRATCH, plan=Plan(**PLACED["mixed"]), dir=tmp_path)
    loss_of(model, 0).backward()
    part = part_of(optimizer)
    before = part.moved()["activations written"]
    assert before > 0
    optimizer.close()
    with Peaks(model) as peaks:
        loss = loss_of(model, 0)
        assert peaks.held - peaks._fixed >= BLOCKS * SAVED
        loss.backward()
    assert part.moved()["activations written"] == before
    assert part.disk_bytes() == 0


def test_a_report_has_what_was_moved(tmp_path: Path) -> None:
    model, optimizer = stow(net(), SCRATCH, plan=Plan(**PLACED["disk"]), dir=tmp_path)
    with optimizer:
        with optimizer.recording():
            train(model, optimizer)
        page = optimizer.report(tmp_path / "out")["page"].read_text(encoding="utf-8")
    assert "activations written" in page


def test_a_storage_of_two_blocks_moves_once(tmp_path: Path) -> None:
    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.bias).sigmoid()  # which saves its output

    model = nn.Sequential(*(Saves() for _ in range(3)))
    plan = Plan(activations="disk", activation_ram_budget=0)
    model, optimizer = stow(model, SCRATCH, plan=plan, dir=tmp_path)
    with optimizer:
        loss_of(model, 0).backward()
        assert part_of(optimizer).moved()["activations written"] == 4 * BLOCK  # x, three outputs


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"activations": "host"}, "in host memory as they are"),
        ({"activation_units": {"0": "host"}}, "in host memory as they are"),
        ({"activation_units": {"4": "disk"}}, "names .'4'."),
        ({"activation_units": {"": "disk"}}, "outside of blocks"),
        ({"activation_units": {"0.up": "disk"}}, "names .'0.up'."),
    ],
)
def test_what_would_have_no_effect_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        stow(net(), partial(AdamW, lr=1e-2), plan=Plan(**given))


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(OptionError, match="no repeated blocks"):
        stow(Vectors([8]), partial(AdamW, lr=1e-2), plan=Plan(activations="recompute"))


def test_a_directory_that_is_refused_leaves_no_hooks(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    model = net()
    plan = Plan(activations="recompute", activation_units={"0": "disk"})
    with pytest.raises(DirectoryError):
        stow(model, SCRATCH, plan=plan, dir=file)
    assert not any("forward" in vars(block) for block in model)
