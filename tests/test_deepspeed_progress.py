"""What is logged of steps, and when."""

import logging

import pytest

from tensorstow.deepspeed.progress import Progress


def test_every_so_many_steps_are_told(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(2, timed=False, logs=True)
    with caplog.at_level(logging.INFO, "tensorstow"):
        for step in range(1, 5):
            with progress.part("forward"):
                pass
            progress.stepped(step, {"skipped": 0})
    assert [r.getMessage() for r in caplog.records] == ["step=2, skipped=0", "step=4, skipped=0"]


def test_seconds_are_told_where_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress(1, timed=True, logs=True)
    with caplog.at_level(logging.INFO, "tensorstow"):
        with progress.part("step"):
            pass
        progress.stepped(1, {})
        progress.stepped(2, {"lr": [0.1]})
    assert caplog.records[0].getMessage().startswith("step=1, step (s)=0.")
    assert caplog.records[1].getMessage() == "step=2, lr=[0.1]"


@pytest.mark.parametrize(("every", "logs"), [(None, True), (1, False)])
def test_other_ranks_and_never_say_nothing(
    caplog: pytest.LogCaptureFixture,
    every: int | None,
    logs: bool,  # noqa: FBT001
) -> None:
    with caplog.at_level(logging.INFO, "tensorstow"):
        Progress(every, timed=False, logs=logs).stepped(1, {})
    assert not caplog.records
