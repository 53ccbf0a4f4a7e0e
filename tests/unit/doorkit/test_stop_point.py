"""Through the doors a signal saves a checkpoint and ends the run, which goes on bit for bit."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstow.deepspeed as deepspeed
from ranks.pool import Ranks
from ranks.stopped_doors import (
    MOMENTS,
    PLUGINS,
    STATUS,
    STEPS,
    STOPPED,
    ColossalRun,
    DeepSpeedRun,
    batch_of,
    until_stopped,
)
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin
from tensorstow.colossalai.nn.optimizer import HybridAdam
from tensorstow.doorkit.stop_point import StopPoint, stop_point

Pools = Callable[[int], Ranks]
ENDED = ([STATUS, None], [0, STOPPED + 1], True)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", ["bf16", "torch_autocast"])
def test_an_engine_goes_on_from_the_step_of_the_signal(
    tmp_path: Path, kind: str, moment: str
) -> None:
    assert until_stopped(DeepSpeedRun, tmp_path, kind, moment, 0) == ENDED


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", PLUGINS)
def test_a_booster_goes_on_from_the_step_of_the_signal(
    tmp_path: Path, kind: str, moment: str
) -> None:
    assert until_stopped(ColossalRun, tmp_path, kind, moment, 0) == ENDED


@pytest.mark.parametrize(
    ("moment", "rank"),
    [
        pytest.param(moment, rank, marks=[pytest.mark.soak] * ((number + rank) % 2))
        for number, moment in enumerate(MOMENTS)
        for rank in (0, 1)
    ],
)
def test_a_signal_to_one_rank_stops_all_engines(
    tmp_path: Path, ranks: Pools, rank: int, moment: str
) -> None:
    ended = ranks(2).run(until_stopped, DeepSpeedRun, tmp_path, "bf16", moment, rank)
    assert ended == [ENDED, ENDED]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("kind", PLUGINS)
def test_a_signal_to_one_rank_stops_all_boosters(
    tmp_path: Path, ranks: Pools, kind: str, moment: str
) -> None:
    assert ranks(2).run(until_stopped, ColossalRun, tmp_path, kind, moment, 1) == [ENDED, ENDED]


# --- the point itself ---


@pytest.fixture
def saves() -> list[str]:
    return []


@pytest.fixture
def point(saves: list[str]) -> Any:  # noqa: ANN401
    made = StopPoint({"SIGUSR1": STATUS}, lambda: saves.append("saved"))
    yield made
    made.close()


def test_it_ends_between_two_steps_only(point: StopPoint, saves: list[str]) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    point.reach()  # no step was taken
    point.note_step()
    with pytest.raises(SystemExit) as ended:
        point.reach()
    assert (ended.value.code, saves) == (STATUS, ["saved"])
    point.note_step()
    point.reach()  # a caller that goes on is stopped by another signal alone
    os.kill(os.getpid(), signal.SIGUSR1)
    point.reach()
    point.note_step()
    with pytest.raises(SystemExit):
        point.reach()


def test_a_save_that_fails_is_repeated_after_the_next_step() -> None:
    fails = [True, False]

    def save() -> None:
        if fails.pop(0):
            raise OSError

    point = StopPoint("SIGUSR1", save)
    os.kill(os.getpid(), signal.SIGUSR1)
    for expected in (OSError, SystemExit):
        point.note_step()
        with pytest.raises(expected):
            point.reach()
    assert fails == []
    point.close()


def test_a_point_that_is_gone_leaves_signals_to_the_handler_before() -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    try:
        point = StopPoint("SIGUSR1", lambda: None)
        del point
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize(
    ("stop_signals", "on_stop"), [("SIGTERM", None), (None, print), ("SIGTERM", "checkpoints")]
)
def test_one_keyword_needs_the_other(stop_signals: Any, on_stop: Any) -> None:  # noqa: ANN401
    with pytest.raises(OptionError, match=r"on_stop\(\) has saved its checkpoint. Pass both"):
        stop_point(stop_signals, on_stop)


def test_bad_values_and_other_threads_are_named() -> None:
    with pytest.raises(OptionError, match="use the name of a signal"):
        stop_point("SIGKILL", print)
    errors: list[str] = []

    def in_a_thread() -> None:
        try:
            stop_point("SIGTERM", print)
        except OptionError as error:
            errors.append(str(error))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert "outside of the main thread" in errors[0]


# --- what the doors refuse ---


def test_an_engine_without_an_optimizer_takes_no_stop_signals() -> None:
    with pytest.raises(OptionError, match="which takes no steps"):
        deepspeed.initialize(
            model=torch.nn.Linear(2, 2),
            config={"train_batch_size": 1},
            stop_signals="SIGTERM",
            on_stop=print,
        )


def test_a_booster_ends_the_run_of_one_optimizer() -> None:
    booster = Booster(plugin=GeminiPlugin(), stop_signals="SIGUSR1", on_stop=print)
    booster.boost(torch.nn.Linear(2, 2))  # one that is not trained
    net = torch.nn.Linear(2, 2)
    model, optimizer, *_ = booster.boost(net, HybridAdam(net.parameters()))
    other = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match="a second optimizer by a Booster with stop_signals="):
        booster.boost(other, HybridAdam(other.parameters()))
    model.stop_point.close()
    optimizer.close()


@pytest.mark.parametrize(("door", "kind"), [(DeepSpeedRun, "bf16"), (ColossalRun, "zero")])
@pytest.mark.parametrize("calls_the_module", [False, True])
def test_the_next_step_has_not_begun(
    tmp_path: Path,
    door: Any,  # noqa: ANN401
    kind: str,
    calls_the_module: bool,  # noqa: FBT001
) -> None:
    """A forward may draw random numbers; of a module that is called directly, backward ends it."""
    run = door(tmp_path, kind, None, 0, {"SIGUSR1": STATUS})
    run.train(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    outer = run.engine if door is DeepSpeedRun else run.model
    if calls_the_module:
        loss = outer.module(batch_of(1).to(next(outer.parameters()).dtype), 1)
        with pytest.raises(SystemExit):
            run.engine.backward(loss) if door is DeepSpeedRun else run.optimizer.backward(loss)
    else:
        outer.module.register_forward_pre_hook(lambda *_: pytest.fail("a step has begun"))
        with pytest.raises(SystemExit):
            outer(batch_of(1), 1)
    run.close()


def test_evaluation_between_steps_ends_nothing(tmp_path: Path) -> None:
    """Training alone has what is saved: a scheduler's step, the counters of the loop."""
    run = ColossalRun(tmp_path, "gemini", None, 0, "SIGUSR1")
    run.train(0)
    os.kill(os.getpid(), signal.SIGUSR1)
    with torch.no_grad():
        run.model(torch.ones(2, 6), 0)
    run._step = 1
    with pytest.raises(SystemExit) as ended:
        run.train(1)
    assert (ended.value.code, (tmp_path / "step").read_text()) == (0, "1")
    run.close()
    assert STEPS > 1
