"""Which parameters move as a whole and which in chunks, and what each will take."""

import pytest
import torch
from torch import nn, optim

from tensorstow.optim.generic.pieces import (
    PartitionedParam,
    Piece,
    expected_states,
    plan_of,
    split_into_pieces,
)
from tensorstow.optim.generic.stepper import Stepper


def how(parameter: torch.Tensor, *, elementwise: bool = True, threads: int = 1) -> list[Piece]:
    return split_into_pieces(parameter, elements=4096, threads=threads, elementwise=elementwise)


def test_large_ones_of_an_elementwise_class_are_cut() -> None:
    assert [p.partition.numel for p in how(torch.ones(100, 100)) if p.partition] == [
        4096,
        4096,
        1808,
    ]


@pytest.mark.parametrize(
    "parameter",
    [
        torch.ones(4096),
        torch.ones(100, 200).t(),
        torch.ones(10_000, dtype=torch.complex64),
    ],
    ids=["small", "turned", "complex"],
)
def test_others_move_as_a_whole(parameter: torch.Tensor) -> None:
    [piece] = how(parameter)
    assert piece.partition is None


def test_what_threads_share_unevenly_and_other_classes_move_as_a_whole() -> None:
    assert len(how(torch.ones(10_000), threads=2)) == 1
    assert len(how(torch.ones(10_000), elementwise=False)) == 1


def test_what_is_expected_of_each_piece() -> None:
    parameter = nn.Parameter(torch.ones(100, 100))
    stepper = Stepper(optim.AdamW, [{"params": [parameter]}], {})
    pieces = how(parameter)
    expected = expected_states(stepper, stepper.group_options[0], parameter, pieces)
    assert expected.disk_bytes == 8 * 10_000
    assert expected.ram_bytes == 4
    assert expected.piece_bytes == (32_768, 32_768, 16_384)
    param = PartitionedParam(parameter, parameter.shape, parameter.dtype, pieces, expected)
    plan = plan_of(param)
    assert (plan.how, plan.pieces, plan.piece_bytes) == ("chunks", 3, 32_768)
    assert not param.stows


def test_what_stays_in_ram_is_expected_there() -> None:
    parameter = nn.Parameter(torch.ones(10, 10))
    stepper = Stepper(optim.AdamW, [{"params": [parameter]}], {})
    expected = expected_states(stepper, stepper.group_options[0], parameter, [])
    assert (expected.ram_bytes, expected.disk_bytes) == (8 * 100 + 4, 0)
