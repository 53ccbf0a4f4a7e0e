"""Matrices of sharded parameters are stepped whole by their owners, with the bits of one rank."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compare import all_equal
from parity.cover import crossed
from ranks.owned import (
    CLASSES,
    SHAPES,
    OwnedCase,
    balance,
    errors,
    of_class,
    of_two_optimizers,
    on_more_ranks,
    sent_bytes,
    through_stow,
)
from ranks.pool import Ranks
from tensorstow import Plan, StowedOptimizer
from tensorstow.base.errors import OptionError

CASES = [
    *(OwnedCase(name, states) for name in CLASSES for states in ("host", "disk")),
    OwnedCase("Muon", 0.5, dtype=torch.bfloat16),
    OwnedCase("Adafactor", "disk", dim=1),
    OwnedCase("Shampoo", 0.5, dim=1),
]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_class_has_the_bits_of_whole_matrices(
    ranks: "Ranks", case: OwnedCase, world: int
) -> None:
    ranks(world).run(of_class, case)


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "Shampoo"])
def test_states_are_loaded_by_another_number_of_ranks(
    ranks: "Ranks", tmp_path: Path, name: str
) -> None:
    path = str(tmp_path / "saved.pt")
    ranks(2).run(on_more_ranks, OwnedCase(name, "disk"), path, True)  # noqa: FBT003
    ranks(3).run(on_more_ranks, OwnedCase(name), path, False)  # noqa: FBT003


PLANS = [
    ("Muon", Plan(stage=1), 2),
    ("Muon", Plan(stage=2), 3),
    ("Muon", Plan(stage=3, states="disk"), 2),
    ("Adafactor", Plan(stage=1, accumulation_steps=2, states="disk"), 4),
    ("Adafactor", Plan(stage=2, accumulation_steps=2), 2),
    ("Shampoo", Plan(stage=2), 2),
    ("Shampoo", Plan(stage=3, accumulation_steps=2), 3),
    ("Muon", Plan(stage=3, replicas=2), 4),
    ("Muon", Plan(stage=1, replicas=2), 4),
]


@pytest.mark.parametrize(
    ("name", "plan", "world"),
    PLANS,
    ids=[f"{n}-z{p.stage}-{p.states}-acc{p.accumulation_steps}-{w}" for n, p, w in PLANS],
)
@pytest.mark.parametrize("masters", [False, True])
def test_a_stowed_model_has_the_bits_of_one_rank(
    ranks: "Ranks",
    name: str,
    plan: Plan,
    world: int,
    masters: bool,  # noqa: FBT001
) -> None:
    case = OwnedCase(name, options={"state_format": "fp32"} if masters else {})
    dtype = torch.bfloat16 if masters else torch.float32
    sizes = ranks(world).run(through_stow, case, plan, dtype)
    here, whole = [here for here, _ in sizes], sizes[0][1]
    assert sum(here) == whole * plan.replicas  # states, and masters, are on their owners alone
    assert max(here) < whole


@crossed(stage=(1, 2, 3), overlap=("none", "forward"), matrices_first=(True, False))
def test_matrices_have_muon_and_the_rest_adamw(
    ranks: "Ranks",
    stage: int,
    overlap: str,
    matrices_first: bool,  # noqa: FBT001
) -> None:
    """Whichever steps last: every rank has the new rows of both."""
    (want,) = ranks(1).run(of_two_optimizers, None, "none", True)  # noqa: FBT003
    for got in ranks(2).run(of_two_optimizers, Plan(stage=stage), overlap, matrices_first):
        assert all_equal(got, want)


def test_what_is_sent_in_a_step(ranks: "Ranks") -> None:
    """Each gradient and weight goes to its owner once, and each new weight comes back."""
    for world in (2, 3):
        answers = ranks(world).run(sent_bytes, OwnedCase("Muon"))
        total, matrices = sum(sent for sent, _ in answers), answers[0][1]
        moved = 3 * sum(matrices) * (world - 1) / world
        # Parts are uneven, begin at multiples of 16 bytes, and a status goes with each round.
        row = max(s[1] * 4 for s in SHAPES)
        slack = len(SHAPES) * (3 * world * (16 + row) + world * world * 16)
        assert abs(total - moved) <= slack


@settings(max_examples=25, deadline=None, database=None)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12))
def test_owners_are_balanced_and_rounds_are_bounded(
    ranks: "Ranks", shapes: list[tuple[int, int]]
) -> None:
    first, *rest = ranks(3).run(balance, shapes)
    assert all(other == first for other in rest)
    loads, rounds = first
    sizes = [4 * rows * columns for rows, columns in shapes]
    largest = max(sizes)
    assert max(loads) - min(loads) <= largest
    assert sorted(nbytes for taken in rounds for _, nbytes in taken) == sorted(sizes)
    for taken in rounds:
        for owner in range(3):
            assert sum(nbytes for who, nbytes in taken if who == owner) <= largest


def test_what_ranks_do_differently_is_named_on_all_of_them(ranks: "Ranks") -> None:
    first, second = ranks(2).run(errors)
    for said in (first, second):
        assert said["missing"][0].startswith("RankError: step() was called with gradients that")
    assert first["dtype"][0].startswith("RankError: step() raised an error on rank 1")
    assert second["dtype"][0].startswith("DTypeError: The gradient of Parameter 0")
    for said in (first, second):
        assert "has states of Parameter" in said["state"][0] or "RankError" in said["state"][0]
        assert all(said[case][1] == "True" for case in ("missing", "dtype", "state"))
    raised = [said["raises"] for said in (first, second)]
    assert sum("this matrix is not to be stepped" in said[0] for said in raised) == 1
    assert sum("RankError: The step of a matrix failed on rank" in said[0] for said in raised) == 1
    assert all(said[2].startswith("PoisonedError") for said in raised)


def refusals() -> list[str]:
    """Return what is said of parameters that are not taken."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    line = init_device_mesh("cpu", (4,))
    cut_twice = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Shard(0), Shard(1)]))
    once = nn.Parameter(DTensor.from_local(torch.ones(2, 2), mesh, [Replicate(), Shard(1)]))
    turned = nn.Parameter(DTensor.from_local(torch.ones(2, 3).T, line, [Shard(0)]))
    StowedOptimizer(torch.optim.Muon, [once], states="host").close()
    said = []
    for kind, parameter in (
        (torch.optim.Muon, cut_twice),
        (torch.optim.Muon, turned),
        (BeginsWithStates, once),
    ):
        with pytest.raises(OptionError) as error:
            StowedOptimizer(kind, [parameter], states="host", per_parameter=True)
        said.append(str(error.value))
    cut_twice.requires_grad_(requires_grad=False)
    ours = StowedOptimizer(torch.optim.Muon, [cut_twice], states="host", per_parameter=True)
    cut_twice.requires_grad_()
    cut_twice.grad = torch.ones_like(cut_twice)
    with pytest.raises(OptionError) as error:
        ours.step()
    ours.close()
    return [*said, str(error.value)]


class BeginsWithStates(torch.optim.Optimizer):
    """Has states before its first step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:  # noqa: ANN401
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Update by the norm of a whole gradient."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["sum"].add_(parameter.grad)
                    parameter.sub_(parameter.grad * group["lr"] / parameter.grad.norm())


def test_what_cannot_be_gathered_is_refused(ranks: "Ranks") -> None:
    for twice, turned, begins, unfrozen in ranks(4).run(refusals):
        assert unfrozen.endswith(twice.partition("Parameter 0")[2])
        assert "Muon is not known to be elementwise, and Parameter 0 of group 0" in twice
        assert "gathered from the ranks of one mesh dimension" in twice
        assert "is sharded and not contiguous, and Muon steps it gathered" in turned
        assert "BeginsWithStates creates its states in its constructor" in begins
