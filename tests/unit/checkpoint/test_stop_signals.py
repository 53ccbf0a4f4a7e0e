"""A signal commits the next step and ends the run with the status that it has."""

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks.pool import Ranks
from ranks.stopped_by_signal import until_stopped
from tensorstow import AdamW
from tensorstow.base.errors import OptionError

Pools = Callable[[int], Ranks]


def make(directory: Path, **given: Any) -> tuple[torch.nn.Linear, AdamW]:  # noqa: ANN401
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    options: dict[str, Any] = {"states": "disk", "dir": directory, "commit_every": None, **given}
    return model, AdamW(model.parameters(), module=model, **options)


def step(model: torch.nn.Linear, optimizer: AdamW) -> None:
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize(("signals", "status"), [("SIGUSR1", 0), ({"SIGUSR1": 75}, 75)])
def test_the_next_step_is_committed_and_is_the_last(
    tmp_path: Path, signals: object, status: int, overlap: str
) -> None:
    model, optimizer = make(tmp_path / "run", stop_signals=signals, overlap=overlap)
    step(model, optimizer)
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as ended, optimizer:
        step(model, optimizer)
    assert ended.value.code == status
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL
    wanted = [p.detach().clone() for p in model.parameters()]
    model, optimizer = make(tmp_path / "run")
    with optimizer:
        assert optimizer.resume() == 2
        assert all(torch.equal(a, b) for a, b in zip(wanted, model.parameters(), strict=True))


def test_a_caller_that_goes_on_is_stopped_by_another_signal_alone(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path / "run", stop_signals="SIGUSR1", commit_every=2)
    with optimizer:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            with pytest.raises(SystemExit):
                step(model, optimizer)
            for _ in range(3):
                step(model, optimizer)
        optimizer.request_commit()
        step(model, optimizer)


def test_a_skipped_step_is_committed_too(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path / "run", stop_signals="SIGUSR1")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with optimizer:
        scaler.scale(model(torch.full((3,), float("inf"))).sum()).backward()
        os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(SystemExit):
            scaler.step(optimizer)
    model, optimizer = make(tmp_path / "run")
    with optimizer:
        assert optimizer.resume() == 1


def test_handlers_of_several_optimizers(tmp_path: Path) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: calls.append(number))
    try:
        first = make(tmp_path / "one", stop_signals="SIGUSR1")
        second = make(tmp_path / "two", stop_signals="SIGUSR1")
        os.kill(os.getpid(), signal.SIGUSR1)
        for model, optimizer in (first, second):
            with pytest.raises(SystemExit):
                step(model, optimizer)
        assert calls == []
        first[1].close()
        second[1].close()  # which puts the first one's handler back, and that is closed
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_was_closed_is_passed_over(tmp_path: Path) -> None:
    """The signal would end the process if a closed handler did what was done before it."""
    first = make(tmp_path / "one", stop_signals="SIGUSR1")
    second = make(tmp_path / "two", stop_signals="SIGUSR1")
    third = make(tmp_path / "three", stop_signals="SIGUSR1")
    second[1].close()
    os.kill(os.getpid(), signal.SIGUSR1)
    for model, optimizer in (first, third):
        with pytest.raises(SystemExit):
            step(model, optimizer)
    third[1].close()
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit):
        step(*first)
    first[1].close()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


def test_it_is_closed_in_any_thread(tmp_path: Path) -> None:
    _, optimizer = make(tmp_path / "one", stop_signals="SIGURG")
    thread = threading.Thread(target=optimizer.close)
    thread.start()
    thread.join()
    os.kill(os.getpid(), signal.SIGURG)  # its default is to be ignored
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


@pytest.mark.parametrize("call", ["commit", "snapshot"])
def test_a_commit_by_hand_leaves_the_stop_to_the_next_step(tmp_path: Path, call: str) -> None:
    model, optimizer = make(tmp_path / "run", stop_signals="SIGUSR1")
    with optimizer:
        step(model, optimizer)
        os.kill(os.getpid(), signal.SIGUSR1)
        getattr(optimizer, call)(*(["one"] if call == "snapshot" else []))
        with pytest.raises(SystemExit):
            step(model, optimizer)
        step(model, optimizer)
        optimizer.request_commit()
        step(model, optimizer)  # which ends nothing


def test_a_step_that_failed_leaves_the_stop_to_the_next_one(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path / "run", stop_signals="SIGUSR1", overlap="backward")
    with optimizer:
        step(model, optimizer)
        optimizer.commit()
        os.kill(os.getpid(), signal.SIGUSR1)
        handle = model.bias.register_hook(lambda _: (_ for _ in ()).throw(ValueError("no")))
        with pytest.raises(ValueError, match="no"):
            model(torch.ones(3)).sum().backward()
        handle.remove()
        optimizer.resume()
        with pytest.raises(SystemExit):
            step(model, optimizer)
    model, optimizer = make(tmp_path / "run")
    with optimizer:
        assert optimizer.resume() == 2


def test_a_commit_that_failed_leaves_the_stop_to_the_next_step(tmp_path: Path) -> None:
    fails = False

    def extra() -> dict[str, int]:
        if fails:
            raise ValueError
        return {"one": 1}

    model, optimizer = make(tmp_path / "run", stop_signals="SIGUSR1", extra=extra)
    with optimizer:
        step(model, optimizer)
        optimizer.commit()
        os.kill(os.getpid(), signal.SIGUSR1)
        fails = True
        with pytest.raises(ValueError):  # noqa: PT011  # extra's own
            step(model, optimizer)
        fails = False
        optimizer.zero_grad()
        optimizer.resume()
        with pytest.raises(SystemExit):
            step(model, optimizer)
    model, optimizer = make(tmp_path / "run")
    with optimizer:
        assert optimizer.resume() == 2


def test_an_extra_by_hand_would_be_lost(tmp_path: Path) -> None:
    model, optimizer = make(tmp_path / "run", stop_signals="SIGUSR1")
    with optimizer:
        step(model, optimizer)
        with pytest.raises(OptionError, match="the one of stop_signals= would lack it"):
            optimizer.commit({"position": 1})


def test_a_closed_optimizer_s_handler_leaves_the_default(tmp_path: Path) -> None:
    _, first = make(tmp_path / "one", stop_signals="SIGURG")  # which is ignored by default
    _, second = make(tmp_path / "two", stop_signals="SIGURG")
    first.close()
    second.close()
    os.kill(os.getpid(), signal.SIGURG)
    assert signal.getsignal(signal.SIGURG) == signal.SIG_DFL


@pytest.mark.parametrize(
    "wrong",
    [
        "SIGKILL",
        "TERM",
        15,
        {"SIGTERM": "0"},
        {"SIGTERM": 256},
        {"SIGSTOP": 0},
        "SIGSEGV",
        "SIGCHLD",
        {"SIGIO": 1, "SIGPOLL": 2},
        {15: 0},
        ["SIGTERM"],
    ],
)
def test_bad_values_are_named(tmp_path: Path, wrong: object) -> None:
    with pytest.raises(OptionError, match=r"stop_signals=.* was given: use the name of a signal"):
        make(tmp_path / "run", stop_signals=wrong)


def test_what_cannot_stop_says_why(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="nothing to commit to: pass the run's directory"):
        make(tmp_path / "run", stop_signals="SIGTERM", durability="none")
    with pytest.raises(OptionError, match="Let the trainer save at a signal, by a callback"):
        make(tmp_path / "run", stop_signals="SIGTERM", checkpoints="reference")
    told: list[str] = []

    def in_a_thread() -> None:
        try:
            make(tmp_path / "run", stop_signals="SIGTERM")
        except OptionError as error:
            told.append(str(error))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert "outside of the main thread" in told[0]


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_all_at_one_step(
    tmp_path: Path,
    ranks: Pools,
    rank: int,
    by_hand: bool,  # noqa: FBT001
) -> None:
    task = partial(until_stopped, by_hand=by_hand)
    (first, second) = ranks(2).run(task, tmp_path / "run", rank)
    assert first == second
    status, stopped, resumed = first
    assert status == 75
    assert resumed == stopped
    assert stopped >= 3
