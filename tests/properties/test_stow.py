"""Parity through the engine: stages, tiers, schedules and ranks give the bits of one process."""

from pathlib import Path

import pytest
import torch

from compare import all_equal, assert_same
from parity.cover import feasible_pairs
from ranks.matrix import AXES, allowed, configs
from ranks.pool import Ranks
from ranks.stowed import RunConfig, alone, loss_of, model_for, stowed
from tensorstow import Plan

CONFIGS = [
    RunConfig(),
    RunConfig(Plan(states="disk")),
    RunConfig(Plan(states="disk"), dtype=torch.bfloat16),
    RunConfig(Plan(states="disk", overlap="forward"), clip=0.1),
    RunConfig(Plan(states="disk", overlap="backward"), dtype=torch.bfloat16),
    RunConfig(Plan(states="disk", overlap="speculative"), clip=0.1),
    RunConfig(Plan(accumulation_steps=3), clip=0.05),
    RunConfig(Plan(accumulation_steps=3, states="disk"), dtype=torch.bfloat16),
    RunConfig(Plan(accumulation_steps=2, states="disk", overlap="backward")),
    RunConfig(Plan(states="disk"), compute_dtype=torch.bfloat16),
    *(RunConfig(Plan(stage=stage, accumulation_steps=2)) for stage in (0, 1, 2)),
    RunConfig(Plan(stage=1, states="disk", overlap="forward"), dtype=torch.bfloat16),
    RunConfig(Plan(parameters="device", states="disk")),
    RunConfig(Plan(parameters="disk", states="disk")),
    RunConfig(Plan(parameters="disk"), clip=0.1),
    RunConfig(Plan(parameters="disk", states="disk", overlap="backward"), dtype=torch.bfloat16),
    RunConfig(Plan(parameters="disk", states="disk", overlap="forward"), clip=0.05),
    RunConfig(Plan(parameters="disk", overlap="forward"), dtype=torch.bfloat16),
    RunConfig(Plan(parameters="disk", states="disk", accumulation_steps=2), dtype=torch.bfloat16),
    RunConfig(Plan(parameter_units={"blocks.1": "disk"}, states="disk", overlap="backward")),
    RunConfig(Plan(parameters="disk", states="disk", overlap="speculative"), clip=0.1),
    RunConfig(
        Plan(parameters="disk", states="disk", overlap="speculative", accumulation_steps=2),
        dtype=torch.bfloat16,
        clip=0.05,
    ),
]


@pytest.mark.parametrize(
    ("config", "world"),
    [
        pytest.param(config, world, marks=[pytest.mark.soak] * ((number + world) % 2))
        for number, config in enumerate(CONFIGS)
        for world in (1, 2)
    ],
    ids=str,
)
def test_stowed_training_has_the_bits_of_training_alone(
    ranks: "Ranks", config: RunConfig, world: int
) -> None:
    want = alone(config, world)
    for got in ranks(world).run(stowed, config):
        assert all_equal(got, want)


MATRIX = configs(AXES)


@pytest.mark.parametrize(("config", "world"), MATRIX, ids=[f"{c}-world{w}" for c, w in MATRIX])
def test_any_two_values_of_two_axes_are_right_together(
    tmp_path: Path, ranks: "Ranks", config: RunConfig, world: int
) -> None:
    want = alone(config, world)
    for got in ranks(world).run(stowed, config, tmp_path / "run"):
        # torch's norm is fp32 and summed in another order
        assert_same(got, want, is_exact=not config.torch_clips)


def test_the_matrix_is_as_large_as_it_says() -> None:
    # A change of these numbers is a change of what is proved: make it on purpose.
    assert len(feasible_pairs(AXES, allowed)) == 652
    assert len(MATRIX) == 27


def test_four_ranks_have_gradients_that_any_order_sums_alike() -> None:
    """Else their configs would prove nothing: whole, not zero, and of the weights as they are."""
    config = RunConfig(dtype=torch.bfloat16, whole=True)
    found = []
    for gain in (1.0, 2.0):
        model = model_for(config)
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(gain)
        loss_of(model, 0, 0, 0).backward()
        found.append([p.grad for p in model.parameters()])
    for gradient in found[0]:
        assert set(gradient.unique().tolist()) <= set(range(-32, 33, 4))
        assert len(gradient.unique()) > 2
    assert any(not torch.equal(a, b) for a, b in zip(*found, strict=True))
