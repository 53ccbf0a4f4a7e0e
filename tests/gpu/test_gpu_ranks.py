"""Whole models over ranks with an accelerator each: the bits of training alone."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from compare import assert_same
from parity.cover import feasible_pairs
from ranks import blocks, meshes
from ranks.matrix import ON_DEVICE, allowed, configs
from ranks.ordered import ordered
from ranks.pool import Ranks
from ranks.stowed import RunConfig, alone, stowed
from tensorstow import Plan

MATRIX = configs(ON_DEVICE)


@pytest.mark.parametrize(("config", "world"), MATRIX, ids=[f"{c}-world{w}" for c, w in MATRIX])
def test_any_two_values_of_two_axes_are_right_together(
    tmp_path: Path,
    device: torch.device,
    device_ranks: Callable[[int], Ranks],
    config: RunConfig,
    world: int,
) -> None:
    want = alone(config, world, device)
    for got in device_ranks(world).run(stowed, config, tmp_path / "run"):
        # torch's norm is fp32 and summed in another order
        assert_same(got, want, is_exact=not config.torch_clips)


def test_the_matrix_is_as_large_as_it_says() -> None:
    # A change of these numbers is a change of what is proved: make it on purpose.
    assert len(feasible_pairs(ON_DEVICE, allowed)) == 1064
    assert len(MATRIX) == 44


@pytest.mark.parametrize("stage", [2, 3])
def test_each_unit_is_gathered_behind_its_new_weights(
    stage: int, device_ranks: Callable[[int], Ranks]
) -> None:
    """FSDP2 copies shards in a stream of its own, which waits for the caller's once a forward."""
    ranks = device_ranks(2)
    want = ranks.run(blocks.trained, "none", stage, 64)
    got = ranks.run(blocks.trained, "forward", stage, 64)
    for ours, theirs in zip(got, want, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("in_rows", [False, True])
def test_shards_in_host_memory_are_in_the_order_of_the_mesh(
    device_ranks: Callable[[int], Ranks], *, in_rows: bool
) -> None:
    assert (
        device_ranks(4).run(partial(meshes.put_together_on_host, in_rows=in_rows))
        == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 4
    )


ORDERED = [
    Plan(parameters="device", stage=1),
    Plan(parameters="device", overlap="backward"),
    Plan(parameters="device", update_on="device", states="disk"),
    Plan(parameters="host"),
    Plan(parameters="disk", states="disk", overlap="forward"),
]


@pytest.mark.parametrize(
    ("plan", "clip"),
    # An overlap with the backward pass uses gradients before their norm is known.
    [
        (plan, clip)
        for plan in ORDERED
        for clip in (None, 0.05)
        if not clip or plan.overlap != "backward"
    ],
    ids=str,
)
def test_ordered_sums_do_not_depend_on_the_number_of_ranks(
    plan: Plan, clip: float | None, device_ranks: Callable[[int], Ranks]
) -> None:
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("this torch has no FSDP2 that sends rows of unused parameters")
    plan = plan.but(ordered_reduce="sum")
    train = partial(ordered, plan, steps=2, micro_batches=6, clip=clip, dtype=torch.bfloat16)
    want, *_ = device_ranks(1).run(train)
    for count in (2, 3):
        assert device_ranks(count).run(train) == [want] * count
