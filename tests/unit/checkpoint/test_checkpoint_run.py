"""What a constructor is told of the run; the command's own ``run`` is in test_run."""

import pytest

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.run import DEFAULT_EVERY, Interval, RunOptions


@pytest.mark.parametrize(
    ("given", "interval"),
    [
        (None, Interval()),
        (1, Interval(steps=1)),
        (500, Interval(steps=500)),
        ("90s", Interval(seconds=90.0)),
        ("10min", Interval(seconds=600.0)),
        (" 1.5 H ", Interval(seconds=5400.0)),
        ("1d", Interval(seconds=86400.0)),
        (DEFAULT_EVERY, Interval(seconds=600.0)),
    ],
)
def test_intervals(given: str | int | None, interval: Interval) -> None:
    assert Interval.parse(given) == interval


@pytest.mark.parametrize(
    "given", [0, -1, True, 1.5, "", "10", "0s", "-3min", "min", "10 weeks", "1e3s"]
)
def test_what_is_no_interval_is_named(given: object) -> None:
    with pytest.raises(OptionError, match=r"commit_every=.* was given"):
        Interval.parse(given)  # type: ignore[arg-type]


def test_nothing_is_committed_unless_asked() -> None:
    assert RunOptions().commit_every == Interval()
    assert RunOptions().accumulation_steps == 1
