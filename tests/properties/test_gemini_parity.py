"""Parity through Gemini's plugin: the bits of the same training in one process, all in RAM."""

from pathlib import Path
from typing import Any

import pytest

from compare import all_equal
from parity.cover import feasible_pairs
from ranks.boosted import boosted
from ranks.matrix import GEMINI, boosted_configs, every, named
from ranks.pool import Ranks
from ranks.stowed import RunConfig, alone

MATRIX = boosted_configs(GEMINI)


@pytest.mark.parametrize(("config", "given", "saved", "world"), MATRIX, ids=named(MATRIX))
def test_any_two_values_of_two_axes_are_right_together(
    tmp_path: Path, ranks: "Ranks", config: RunConfig, given: dict[str, Any], saved: str, world: int
) -> None:
    want = alone(config, world)
    for got in ranks(world).run(boosted, config, given, saved, tmp_path):
        assert all_equal(got, want)


def test_the_matrix_is_as_large_as_it_says() -> None:
    # A change of these numbers is a change of what is proved: make it on purpose.
    assert len(feasible_pairs(GEMINI, every)) == 177
    assert len(MATRIX) == 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RunConfig(), RunConfig(tied=False)),
        (RunConfig(clip=0.05), RunConfig()),
        (RunConfig(frozen=True), RunConfig()),
    ],
    ids=str,
)
def test_an_axis_changes_the_weights(one: RunConfig, other: RunConfig) -> None:
    """Else its rows would be compared with nothing."""
    assert any((a != b).any() for a, b in zip(alone(one, 1), alone(other, 1), strict=False))
