from dataclasses import astuple

import pytest

from demo.configurations import CONFIGURATIONS, FULL, SMALL, ModelSize


def test_the_rows_are_the_eight_of_the_example() -> None:
    assert [(r.key, r.optimizer, r.fraction, r.schedule, r.overlap) for r in CONFIGURATIONS] == [
        ("torch", "torch", 0.0, "pipelined", "none"),
        ("ram", "HybridAdam", 0.0, "pipelined", "none"),
        ("naive", "HybridAdam", 1.0, "naive", "none"),
        ("half", "HybridAdam", 0.5, "pipelined", "none"),
        ("full", "HybridAdam", 1.0, "pipelined", "none"),
        ("forward", "AdamW", 1.0, "pipelined", "forward"),
        ("backward", "AdamW", 1.0, "pipelined", "backward"),
        ("stow", "stow", 1.0, "pipelined", "backward"),
    ]


def test_headings_are_short_enough_for_eighty_columns() -> None:
    assert max(len(line) for row in CONFIGURATIONS for line in row.title.splitlines()) <= 10


def test_the_model_is_gpt2_as_it_comes() -> None:
    assert FULL.parameters == 124_439_808
    assert (FULL.batch, FULL.sequence) == (4, 128)


@pytest.mark.parametrize("scale", [FULL, SMALL])
def test_disk_holds_every_state(scale: ModelSize) -> None:
    assert scale.row_disk_bytes > 12 * scale.parameters  # with the weights that stow puts there
    assert scale.rows_disk_bytes == 6 * scale.row_disk_bytes
    assert scale.run_disk_bytes == 2 * scale.row_disk_bytes
    assert scale.rows_ram_bytes > (8 * 4 + 2.5 * 8) * scale.parameters
    assert scale.sequence <= scale.positions


def test_only_the_naive_row_is_moved_naively() -> None:
    assert [SMALL.policy(row).schedule == "naive" for row in CONFIGURATIONS] == [
        row.key == "naive" for row in CONFIGURATIONS
    ]
    assert SMALL.policy(CONFIGURATIONS[4]).chunk_elements == astuple(SMALL)[-1]
