"""What is logged of steps, and when."""

import logging

import pytest

import children
from tensorstow.deepspeed.timer import StepTimer, ThroughputTimer


def test_every_so_many_steps_are_told(caplog: pytest.LogCaptureFixture) -> None:
    timer = StepTimer(2, timed=False, logs=True)
    with caplog.at_level(logging.INFO, "tensorstow"):
        for step in range(1, 5):
            with timer.measure("forward"):
                pass
            timer.log_step(step, {"skipped": 0})
    assert [r.getMessage() for r in caplog.records] == ["step=2, skipped=0", "step=4, skipped=0"]


def test_seconds_are_told_where_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    timer = StepTimer(1, timed=True, logs=True)
    with caplog.at_level(logging.INFO, "tensorstow"):
        with timer.measure("step"):
            pass
        timer.log_step(1, {})
        timer.log_step(2, {"lr": [0.1]})
    assert caplog.records[0].getMessage().startswith("step=1, step (s)=0.")
    assert caplog.records[1].getMessage() == "step=2, lr=[0.1]"


@pytest.mark.parametrize(("every", "logs"), [(None, True), (1, False)])
def test_other_ranks_and_never_say_nothing(
    caplog: pytest.LogCaptureFixture,
    every: int | None,
    logs: bool,  # noqa: FBT001
) -> None:
    with caplog.at_level(logging.INFO, "tensorstow"):
        StepTimer(every, timed=False, logs=logs).log_step(1, {})
    assert not caplog.records


def test_samples_per_second_are_those_behind_the_second_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    timer = ThroughputTimer(batch_size=12)
    for step in range(4):
        assert (timer.avg_samples_per_sec() > 0.0) == (step > 2)
        for ends_step in (False, True):
            timer.start()
            timer.stop(global_step=ends_step)
    timer.stop(global_step=True)  # nothing has begun
    assert (timer.global_step_count, timer.micro_step_count) == (4, 8)
    assert (timer.total_elapsed_time, timer.avg_samples_per_sec()) == (4.0, 6.0)
    timer.update_epoch_count()
    assert (timer.epoch_count, timer.micro_step_count) == (1, 0)


IN_A_SCRIPT = """
import logging
from tensorstow.deepspeed.timer import StepTimer
timer = StepTimer(1, timed=False, logs=True)
timer.log_step(1, {"skipped": 0})
timer.log_step(2, {"skipped": 0})
logging.getLogger("tensorstow.deepspeed").setLevel(logging.WARNING)
timer.log_step(3, {"skipped": 0})
"""


def test_a_script_that_sets_up_no_logging_sees_them() -> None:
    done = children.run("-c", IN_A_SCRIPT)
    assert [line.partition("] [INFO] ")[2] for line in done.stdout.splitlines()] == [
        "[Rank 0] step=1, skipped=0",
        "[Rank 0] step=2, skipped=0",
    ]
    assert not done.stderr


def test_a_level_that_the_user_gave_holds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    timer = StepTimer(1, timed=False, logs=True)
    timer.log_step(1, {})
    assert len(caplog.records) == 1
    for name in ("tensorstow", "tensorstow.deepspeed"):
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger(name), "level", logging.WARNING)
            timer.log_step(2, {})
    assert len(caplog.records) == 1
