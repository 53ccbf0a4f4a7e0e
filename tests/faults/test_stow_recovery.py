"""What an exception ends is forgotten, by FSDP2 too: training goes on as without that step."""

from pathlib import Path

import pytest
import torch

from compare import all_equal
from ranks.broken import (
    aborted_look,
    broken,
    half_a_backward,
    resumed,
    tied_sums,
    unrecoverable,
)
from ranks.pool import Ranks
from tensorstow import Plan

PLANS = [
    Plan(),
    Plan(parameters="disk", states="disk"),
    Plan(parameters="disk", states="disk", overlap="forward"),
    Plan(stage=1),
    Plan(stage=2),
    Plan(states="disk", overlap="forward"),
]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_training_goes_on_behind_an_exception(ranks: "Ranks", plan: Plan, where: str) -> None:
    (want,) = ranks(1).run(_whole, plan, where)
    (got,) = ranks(1).run(_sharded, plan, where)
    assert all_equal(got, want)


def _whole(plan: Plan, where: str) -> list[torch.Tensor]:
    return broken(plan, where, sharded=False)


def _sharded(plan: Plan, where: str) -> list[torch.Tensor]:
    return broken(plan, where, sharded=True)


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_a_look_that_ends_early_leaves_no_old_weights(ranks: "Ranks", plan: Plan) -> None:
    ((want, norm),) = ranks(1).run(_looked_whole, plan)
    ((got, same_norm),) = ranks(1).run(_looked_sharded, plan)
    assert all_equal(got, want)
    assert same_norm == pytest.approx(norm, rel=1e-5)


def _looked_whole(plan: Plan) -> tuple[list[torch.Tensor], float]:
    return aborted_look(plan, sharded=False)


def _looked_sharded(plan: Plan) -> tuple[list[torch.Tensor], float]:
    return aborted_look(plan, sharded=True)


def test_half_a_backward_is_no_step(ranks: "Ranks") -> None:
    for said in ranks(2).run(half_a_backward, Plan()):
        assert "did not end" in said


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    "plan",
    [Plan(states="disk"), Plan(parameters="disk", states="disk"), Plan(states="disk", stage=2)],
    ids=["host", "disk", "stage 2"],
)
def test_resume_goes_on_from_the_commit(
    ranks: "Ranks", tmp_path: Path, plan: Plan, where: str
) -> None:
    for got, right in ranks(2).run(resumed, tmp_path / "run", plan, where):
        assert got == right


def test_a_weight_that_is_used_twice_is_summed_alike(ranks: "Ranks") -> None:
    (want,) = ranks(1).run(_tied_sharded)
    (got,) = ranks(1).run(_tied_whole)
    assert all_equal(got, want)


def _tied_sharded() -> list[torch.Tensor]:
    return tied_sums(sharded=True)


def _tied_whole() -> list[torch.Tensor]:
    return tied_sums(sharded=False)


def test_a_torch_that_cannot_recover_is_named(ranks: "Ranks") -> None:
    for said in ranks(1).run(unrecoverable):
        assert torch.__version__ in said
        assert "2.13" in said
