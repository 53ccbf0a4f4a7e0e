"""One piece's step: slices are stepped as torch steps the whole, numbers once."""

import pytest
import torch
from torch import nn, optim

from tensorstow.base.errors import OptionError
from tensorstow.optim.generic.partition import Partition
from tensorstow.optim.generic.piece_step import Job, sliced_entry, slices, step_piece
from tensorstow.optim.generic.pieces import ExpectedStates, PartitionedParam, Piece
from tensorstow.optim.generic.stepper import Stepper

NOTHING = ExpectedStates({}, 0, 0, ())


def job_for(
    optimizer_class: type[optim.Optimizer], pieces: list[Piece], numel: int
) -> tuple[Stepper, Job]:
    parameter = nn.Parameter(torch.ones(numel))
    parameter.grad = torch.arange(float(numel))
    stepper = Stepper(optimizer_class, [{"params": [parameter]}], {})
    param = PartitionedParam(parameter, parameter.shape, parameter.dtype, pieces, NOTHING)
    return stepper, Job(stepper.group_options[0], param, {}, parameter)


def test_numbers_count_once_for_all_slices() -> None:
    pieces = [Piece(Partition(0, (64, 64))), Piece(Partition(128, (64, 8)))]
    stepper, job = job_for(optim.NAdam, pieces, 200)
    first = step_piece(stepper, job, pieces[0], None)
    assert job.resident == {}
    assert {name: slot.shape for name, slot in first.stowed.items()} == {
        "exp_avg": (128,),
        "exp_avg_sq": (128,),
    }
    step_piece(stepper, job, pieces[1], None)
    assert job.resident["step"] == 1
    assert job.resident.keys() == {"step", "mu_product"}


def test_slices_are_views_of_the_weight_and_of_the_gradient() -> None:
    parameter = nn.Parameter(torch.zeros(10, 20))
    parameter.grad = torch.arange(200.0).view(10, 20)
    a, b = slices(parameter, Partition(64, (64, 8)))
    with torch.no_grad():
        b.fill_(1.0)
    assert parameter.detach().view(-1)[128:136].sum() == 8
    assert a.grad is not None
    assert a.grad[0] == 64


def test_an_entry_is_sliced_without_its_numbers() -> None:
    entry = {"step": torch.tensor(1.0), "x": torch.arange(200.0).view(10, 20), "n": 3}
    part = sliced_entry(entry, Partition(64, (64,)), 200)
    assert part.keys() == {"x"}
    assert part["x"][0] == 64


class KeepsTheGradient(optim.Optimizer):
    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        del closure
        for p in self.param_groups[0]["params"]:
            self.state[p]["last"] = p.grad


@pytest.mark.parametrize("partition", [None, Partition(0, (5000,))])
def test_a_state_that_is_the_gradient_itself_is_refused(partition: Partition | None) -> None:
    piece = Piece(partition)
    stepper, job = job_for(KeepsTheGradient, [piece], 5000)
    with pytest.raises(OptionError, match="shares memory"):
        step_piece(stepper, job, piece, None)
