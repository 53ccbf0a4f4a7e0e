import json

import pytest
from demo_results import MIB, make_result, make_results

from demo.configurations import CONFIGURATIONS
from demo.result import RunResult, by_key, spread, steady
from tensorstow.report.spans import TimeSpan

FULL = make_result(CONFIGURATIONS[4])


def test_a_line_of_json_brings_everything_back() -> None:
    for row in CONFIGURATIONS:
        result = make_result(row)
        assert RunResult.of(json.loads(result.to_json())) == result
    assert "\n" not in FULL.to_json()


def test_losses_survive_to_the_last_bit() -> None:
    losses = tuple(RunResult.of(json.loads(FULL.to_json())).losses)
    assert [x.hex() for x in losses] == [x.hex() for x in FULL.losses]


def test_times_of_steps() -> None:
    assert FULL.step_seconds == pytest.approx([3.5] * 3)
    assert FULL.optimizer_seconds == pytest.approx([0.5] * 3)
    assert FULL.step_span(1) == TimeSpan("compute", "step 2", 4.0, 7.5, 1)
    assert FULL.optimizer_span(2).start == 11.0


def test_a_transfer_counts_inside_by_its_overlap() -> None:
    # Per step: half of a read, a whole read, half of a write.
    assert FULL.bytes_inside == pytest.approx(3 * 2 * MIB)
    assert FULL.moved_bytes == 9 * MIB
    assert FULL.step_bandwidth == pytest.approx(2 * MIB / 0.5)


def test_the_first_step_of_a_turn_does_not_count() -> None:
    result = make_result(CONFIGURATIONS[4], steps=5)
    assert result.turns == (2, 2, 1)
    assert result.steady_steps == [1, 3]
    assert result.steady_seconds == pytest.approx([3.5, 3.5])
    assert result.steady_optimizer_seconds == pytest.approx([0.5, 0.5])
    assert steady(result) == pytest.approx(3.5)
    assert steady(make_result(CONFIGURATIONS[4], steps=1)) is None


def test_the_spread_is_of_the_median() -> None:
    assert spread([2.0, 1.0, 4.0]) == 1.5
    assert spread([2.0]) is None


def test_results_are_found_by_key() -> None:
    assert list(by_key(make_results())) == [row.key for row in CONFIGURATIONS]
