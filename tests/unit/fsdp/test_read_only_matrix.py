"""Pairs of everything a model that is only read can be asked for: the bits of that in memory."""

from pathlib import Path

import pytest
import torch

from generated import AXES, allowed, both
from parity.cover import all_pairs, feasible_pairs

ROWS = all_pairs(AXES, allowed)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_what_is_read_computes_the_bits_of_the_model_in_memory(
    row: dict[str, str | int | float | bool], tmp_path: Path
) -> None:
    expected, told = both(row, tmp_path, torch.device("cpu"))
    assert len(told) == len(expected) >= 2
    assert all(torch.equal(a, b) for a, b in zip(told, expected, strict=True))


def test_the_matrix_is_as_large_as_it_says() -> None:
    # A change of these numbers is a change of what is proved: make it on purpose.
    assert (len(feasible_pairs(AXES, allowed)), len(ROWS)) == (244, 20)
