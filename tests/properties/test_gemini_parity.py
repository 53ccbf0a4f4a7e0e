"""Parity through Gemini's plugin: the bits of the same training in one process, all in RAM."""

from pathlib import Path
from typing import Any

import pytest

from compare import all_equal
from parity.cover import feasible_pairs
from ranks.boosted import boosted
from ranks.matrix import GEMINI, boosted_courses, every, named
from ranks.pool import Ranks
from ranks.stowed import Course, alone

MATRIX = boosted_courses(GEMINI)


@pytest.mark.parametrize(("course", "given", "saved", "world"), MATRIX, ids=named(MATRIX))
def test_any_two_values_of_two_axes_are_right_together(
    tmp_path: Path, ranks: "Ranks", course: Course, given: dict[str, Any], saved: str, world: int
) -> None:
    want = alone(course, world)
    for got in ranks(world).run(boosted, course, given, saved, tmp_path):
        assert all_equal(got, want)


def test_the_matrix_is_as_large_as_it_says() -> None:
    # A change of these numbers is a change of what is proved: make it on purpose.
    assert len(feasible_pairs(GEMINI, every)) == 177
    assert len(MATRIX) == 10


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Course(), Course(tied=False)),
        (Course(clip=0.05), Course()),
        (Course(frozen=True), Course()),
    ],
    ids=str,
)
def test_an_axis_changes_the_weights(one: Course, other: Course) -> None:
    """Else its rows would be compared with nothing."""
    assert any((a != b).any() for a, b in zip(alone(one, 1), alone(other, 1), strict=False))
