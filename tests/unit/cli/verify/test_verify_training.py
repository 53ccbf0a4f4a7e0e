import pytest

from tensorstow.cli.verify.rows import VerifiedRun, runs_of
from tensorstow.cli.verify.training import Outcome, differences, first_difference

STATES = {"exp_avg of a": "5"}
REFERENCE = Outcome((2.0, 1.0), {"a": "1", "b": "2"}, STATES, 0.1)


@pytest.mark.parametrize(
    ("outcome", "what"),
    [
        (Outcome((2.0, 1.0), {"a": "1", "b": "2"}, STATES, 9.9), None),
        (
            Outcome((2.0, 1.0000001), {"a": "3", "b": "3"}, STATES, 0.1),
            "the loss of step 2 is 1.0000001 instead of 1.0",
        ),
        (Outcome((2.0,), {"a": "1", "b": "2"}, STATES, 0.1), "it took 1 steps instead of 2"),
        (Outcome((2.0, 1.0), {"a": "1"}, STATES, 0.1), "it has other parameters"),
        (
            Outcome((2.0, 1.0), {"a": "1", "b": "3"}, STATES, 0.1),
            "all losses are equal, and the parameter b differs at the end",
        ),
        (
            Outcome((2.0, 1.0), {"a": "1", "b": "2"}, {"exp_avg of a": "6"}, 0.1),
            "all losses are equal, and the state exp_avg of a differs at the end",
        ),
        (Outcome((2.0, 1.0), {"a": "1", "b": "2"}, {}, 0.1), "it has other states"),
        (
            Outcome((2.0, 1.0), {"a": "4", "b": "3"}, STATES, 0.1),
            "all losses are equal, and 2 parameters differ, the first is a, at the end",
        ),
    ],
)
def test_what_differs_first_is_said(outcome: Outcome, what: str | None) -> None:
    assert first_difference(outcome, REFERENCE) == what


def test_a_loss_that_is_minus_zero_or_no_number_is_compared_by_its_bits() -> None:
    zero = Outcome((0.0,), {}, {}, 0.0)
    assert first_difference(Outcome((-0.0,), {}, {}, 0.0), zero) is not None
    nan = Outcome((float("nan"),), {}, {}, 0.0)
    assert first_difference(nan, nan) is None


def test_each_run_is_compared_with_the_first_of_its_dtype() -> None:
    other = Outcome((3.0,), {"a": "9"}, {}, 0.1)
    outcomes = {
        run: REFERENCE if run.dtype == "fp32" else other for run in runs_of(["fp32", "bf16"])
    }
    assert differences(outcomes) == {}
    wrong = VerifiedRun("bf16", "disk", "split", "backward")
    outcomes[wrong] = REFERENCE
    assert list(differences(outcomes)) == [wrong]
