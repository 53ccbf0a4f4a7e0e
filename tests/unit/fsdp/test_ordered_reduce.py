"""``ordered_reduce``: the same weights, to the bit, on any number of ranks."""

from functools import partial
from pathlib import Path

import pytest
import torch

from ranks.ordered import ordered, refused
from ranks.pool import Pool
from tensorstow import Plan

DISK = Plan(ordered_reduce="sum", parameters="disk", states="disk")


def check(ranks: Pool, counts: list[int], plan: Plan, *, steps: int = 2, **options: object) -> None:
    """Compare the weights of each of so many ranks with those of one rank."""
    train = partial(ordered, plan, steps=steps, **options)
    alone, *_ = ranks(1).run(train)
    for count in counts:
        assert ranks(count).run(train) == [alone] * count


@pytest.mark.parametrize(
    "plan",
    [
        Plan(ordered_reduce="sum"),
        Plan(ordered_reduce="sum", stage=1),
        Plan(ordered_reduce="sum", stage=2, states="disk", overlap="backward"),
        DISK,
        DISK.but(overlap="backward"),
    ],
    ids=str,
)
def test_sums_do_not_depend_on_the_number_of_ranks(ranks: Pool, plan: Plan) -> None:
    check(ranks, [2, 3, 4], plan, steps=3)


@pytest.mark.parametrize("plan", [Plan(ordered_reduce="sum", stage=1), DISK], ids=str)
def test_fp16_sums_do_not_depend_on_the_number_of_ranks(ranks: Pool, plan: Plan) -> None:
    check(ranks, [2, 3], plan, dtype=torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", [Plan(stage=1), Plan(), DISK.but(ordered_reduce=None)], ids=str)
def test_means_do_not_depend_on_powers_of_two(ranks: Pool, plan: Plan, dtype: torch.dtype) -> None:
    check(ranks, [2, 4], plan.but(ordered_reduce="mean"), dtype=dtype)


@pytest.mark.parametrize("plan", [Plan(ordered_reduce="sum", stage=1), DISK], ids=str)
def test_clipping_does_not_depend_on_the_number_of_ranks(ranks: Pool, plan: Plan) -> None:
    check(ranks, [2, 3], plan, clip=0.05, scalar=plan.stage == 1)


@pytest.mark.parametrize("plan", [Plan(ordered_reduce="sum", stage=2), DISK], ids=str)
def test_micro_batches_may_use_other_parameters_and_some_are_frozen(
    ranks: Pool, plan: Plan
) -> None:
    check(ranks, [2, 3], plan, clip=0.05, branches=True, frozen=True)


def test_autocast_weights_do_not_depend_on_the_number_of_ranks(ranks: Pool) -> None:
    check(ranks, [2, 3], DISK, compute_dtype=torch.bfloat16)


def test_without_an_order_the_number_of_ranks_changes_bits(ranks: Pool) -> None:
    alone, *_ = ranks(1).run(ordered, Plan())
    assert ranks(3).run(ordered, Plan()) != [alone] * 3


def test_a_run_on_other_ranks_goes_on_with_the_bits_of_one(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks(1).run(partial(ordered, DISK, steps=8, clip=0.05))
    for count, steps in ((1, 2), (4, 4), (2, 6), (3, 8)):
        options = {"steps": steps, "clip": 0.05, "dir": tmp_path, "commit_every": 1}
        digests = ranks(count).run(partial(ordered, DISK, **options))
    assert digests == whole * 3


@pytest.mark.parametrize(
    ("mistake", "plan", "message"),
    [
        ("unreduced", Plan(ordered_reduce="mean", stage=1), "were to stay unreduced"),
        ("unreduced", DISK, "were to stay unreduced"),
        ("twice", DISK, "were reduced twice for one forward"),
        ("force_sum", DISK.but(ordered_reduce="mean"), "set_force_sum_reduction_for_comms()"),
    ],
)
def test_what_has_no_order_raises_on_every_rank(
    ranks: Pool, mistake: str, plan: Plan, message: str
) -> None:
    for raised in ranks(2).run(refused, plan, mistake):
        assert raised.startswith("OptionError")
        assert message in raised


def test_one_rank_may_leave_gradients_unreduced(ranks: Pool) -> None:
    assert ranks(1).run(refused, DISK, "unreduced") == ["nothing was raised"]
