from dataclasses import astuple

import pytest

from tensorstow.cli.demo.rows import FULL, ROWS, SMALL, Scale


def test_the_rows_are_the_five_of_the_example() -> None:
    assert [(r.key, r.optimizer, r.fraction, r.schedule) for r in ROWS] == [
        ("torch", "torch", 0.0, "pipelined"),
        ("ram", "tensorstow", 0.0, "pipelined"),
        ("naive", "tensorstow", 1.0, "naive"),
        ("half", "tensorstow", 0.5, "pipelined"),
        ("full", "tensorstow", 1.0, "pipelined"),
    ]


def test_headings_are_short_enough_for_eighty_columns() -> None:
    assert max(len(line) for row in ROWS for line in row.title.splitlines()) <= 10


def test_the_model_is_gpt2_as_it_comes() -> None:
    assert FULL.parameters == 124_439_808
    assert (FULL.batch, FULL.sequence) == (4, 128)


@pytest.mark.parametrize("scale", [FULL, SMALL])
def test_disk_holds_every_state(scale: Scale) -> None:
    assert scale.disk_bytes > 8 * scale.parameters
    assert scale.sequence <= scale.positions


def test_only_the_naive_row_is_moved_naively() -> None:
    assert [SMALL.policy(row).schedule == "naive" for row in ROWS] == [
        row.key == "naive" for row in ROWS
    ]
    assert SMALL.policy(ROWS[-1]).chunk_elements == astuple(SMALL)[-1]
