"""Calls from signal handlers and from other threads: they wait, or are refused by name."""

import ctypes
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from interrupts import at_event, by_signal, handler
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import CommitError, OptionError, PoisonedError, StowError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.optim.state_dicts import StateLoad
from tensorstow.step import call_lock
from tensorstow.step.call_lock import CallLock

POLICY = PipelinePolicy(chunk_elements=64, backend="threads", depth=2)
OVERLAPS = ["none", "forward", "backward"]


def made(directory: Path | None, overlap: str, **given: Any) -> tuple[nn.Module, AdamW]:  # noqa: ANN401
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4))
    if directory is not None:
        given = {"states": "disk", "dir": directory, "commit_every": None, **given}
    given = {"overlap": overlap, "module": model, "policy": POLICY, **given}
    return model, AdamW(model.parameters(), lr=1e-2, **given)


def train(model: nn.Module, optimizer: AdamW, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(seed)
        torch.autograd.backward(model(torch.randn(3, 5, generator=generator)).square().mean())
        optimizer.step()


def weights(model: nn.Module, optimizer: AdamW) -> list[torch.Tensor]:
    optimizer.wait()
    return [p.detach().clone() for p in model.parameters()]


def committed_weights(directory: Path) -> tuple[int | None, list[torch.Tensor]]:
    model, optimizer = made(directory, "none")
    step = optimizer.resume()
    found = weights(model, optimizer)
    optimizer.close()
    return step, found


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_commit_in_a_handler_is_made_or_refused(overlap: str, tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, overlap)
    plain = made(None, "none")
    train(*plain, range(1))
    train(model, optimizer, range(1))
    told: list[str] = []

    def commit() -> None:
        try:
            told.append(str(optimizer.commit()))
        except (CommitError, OptionError) as error:
            told.append(str(error))

    with handler(commit):
        for seed in range(1, 14):
            train(*plain, range(seed, seed + 1))
            at_event(
                47 * seed,
                by_signal,
                lambda seed=seed: train(model, optimizer, range(seed, seed + 1)),
            )
            assert all(map(torch.equal, weights(model, optimizer), weights(*plain))), told[-1]
    assert any("request_commit()" in word for word in told)
    assert all("request_commit()" in w or "backward and step()" in w or w.isdigit() for w in told)
    optimizer.commit()
    optimizer.close()
    step, found = committed_weights(tmp_path)
    assert step == 14
    assert all(map(torch.equal, found, weights(*plain)))


def test_a_commit_in_a_handler_while_a_forward_waits(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, "forward")
    plain = made(None, "none")
    told: list[int] = []
    with handler(lambda: told.append(optimizer.commit())):
        for number in range(1, 400, 4):
            train(*plain, range(number, number + 1))
            train(model, optimizer, range(number, number + 1))
            if not at_event(number, by_signal, lambda: model(torch.ones(1, 5))):
                break
            assert all(map(torch.equal, weights(model, optimizer), weights(*plain)))
    assert len(told) > 5
    optimizer.close()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("inside", [False, True])
def test_a_requested_commit_is_durable_when_the_step_is_over(
    overlap: str, tmp_path: Path, *, inside: bool
) -> None:
    model, optimizer = made(tmp_path, overlap)
    train(model, optimizer, range(2))
    with handler(optimizer.request_commit):
        if inside:
            # In the middle of step(): behind the decision whether it commits.
            steps = optimizer._runtime.steps
            owner: Any = steps if overlap != "backward" else steps.clip
            name = "_take_new_step" if overlap != "backward" else "of_now"
            given = getattr(owner, name)

            def late(*args: Any) -> Any:  # noqa: ANN401
                signal.raise_signal(signal.SIGUSR1)
                return given(*args)

            setattr(owner, name, late)
            train(model, optimizer, range(2, 3))
            delattr(owner, name)
        else:
            signal.raise_signal(signal.SIGUSR1)
            train(model, optimizer, range(2, 3))
    assert optimizer._runtime.commits.committed == 3
    train(model, optimizer, range(3, 4))
    assert optimizer._runtime.commits.committed == 3, "it is asked for once"
    optimizer.close()
    _again, found = made(tmp_path, "none")
    assert found.resume() in {3, 4}  # close() may commit what was trained
    found.close()


def test_a_request_with_nowhere_to_commit_is_refused() -> None:
    _, optimizer = made(None, "none")
    with pytest.raises(OptionError, match=r"request_commit\(\) was requested.*scratch"):
        optimizer.request_commit()


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_commits_of_another_thread_wait_for_the_step(overlap: str, tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, overlap)
    plain = made(None, "none")
    train(*plain, range(30))
    over = threading.Event()
    failed: list[StowError] = []
    commits: list[int] = []

    def keep_committing() -> None:
        while not over.is_set():
            try:
                commits.append(optimizer.commit())
                optimizer.state_dict()
                optimizer.wait()
            except StowError as error:
                failed.append(error)

    thread = threading.Thread(target=keep_committing)
    thread.start()
    try:
        train(model, optimizer, range(30))
    finally:
        over.set()
        thread.join()
    assert commits == sorted(commits)
    assert all(map(torch.equal, weights(model, optimizer), weights(*plain)))
    assert not failed or overlap == "backward"  # between backward and step(), by name
    assert all('overlap="backward"' in str(error) for error in failed)
    optimizer.commit()
    optimizer.close()
    step, found = committed_weights(tmp_path)
    assert step == 30
    assert all(map(torch.equal, found, weights(*plain)))


CALLS: dict[str, Callable[[AdamW], object]] = {
    "step": lambda o: o.step(),
    "zero_grad": lambda o: o.zero_grad(),
    "commit": lambda o: o.commit(),
    "snapshot": lambda o: o.snapshot("name"),
    "snapshots": lambda o: o.snapshots(),
    "drop": lambda o: o.drop("name"),
    "resume": lambda o: o.resume(),
    "close": lambda o: o.close(),
    "state_dict": lambda o: o.state_dict(),
    "load_state_dict": lambda o: o.load_state_dict({}),
    "save_safetensors": lambda o: o.save_safetensors("nowhere"),
    "synchronize": lambda o: o.synchronize(),
    "clip_grad_norm_": lambda o: o.clip_grad_norm_(1.0),
    "add_param_group": lambda o: o.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_inside_another_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    asked: list[StowError] = []

    def extra() -> dict[str, int]:
        if name == "state_dict":
            optimizer.state_dict()  # it only reads
        else:
            with pytest.raises(
                (OptionError, CommitError), match=rf"{name}\(\) was called inside"
            ) as e:
                CALLS[name](optimizer)
            asked.append(e.value)
        optimizer.wait()
        return {}

    model, optimizer = made(tmp_path, "none", commit_every=1, extra=dict)
    optimizer._runtime.commits.extra_now = optimizer._call_lock.allowing_reads(extra)
    train(model, optimizer, range(2))
    assert optimizer._runtime.commits.step == 2
    assert len(optimizer.param_groups) == 1
    assert bool(asked) == (name != "state_dict")
    assert all(isinstance(e, CommitError) == (name in {"commit", "snapshot"}) for e in asked)
    optimizer.close()


def test_a_step_that_is_refused_keeps_its_clip_factor() -> None:
    model, optimizer = made(None, "none")
    plain = made(None, "none")
    for m, o in ((model, optimizer), plain):
        torch.autograd.backward(m(torch.ones(3, 5)).square().mean())
        o.clip_grad_norm_(1e-3)
    optimizer.param_groups[0]["eps"] = -1.0
    with pytest.raises(OptionError):
        optimizer.step()
    optimizer.param_groups[0]["eps"] = 1e-8
    optimizer.step()
    plain[1].step()
    assert all(map(torch.equal, weights(model, optimizer), weights(*plain)))


def test_an_interrupted_load_is_no_state(tmp_path: Path) -> None:
    model, optimizer = made(tmp_path, "none")
    train(model, optimizer, range(2))
    optimizer.commit()
    want = weights(model, optimizer)
    saved = optimizer.state_dict()

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateLoad, "put_tensors_in_place", fail)
        with pytest.raises(KeyboardInterrupt):
            optimizer.load_state_dict(saved)
    with pytest.raises(PoisonedError, match=r"KeyboardInterrupt.*resume\(\)"):
        optimizer.step()
    assert optimizer.resume() == 2
    assert all(map(torch.equal, weights(model, optimizer), want))
    optimizer.close()


def test_calls_take_turns() -> None:
    lock = CallLock()
    order: list[str] = []
    entered = threading.Event()

    def first() -> None:
        entered.set()
        order.append("first")

    def other() -> None:
        lock.run("commit", lambda: order.append("other"))

    def act() -> None:
        thread.start()
        with pytest.raises(CommitError, match=r"commit\(\) was called inside step\(\)"):
            lock.run("commit", lambda: None)
        thread.join(0.05)
        first()

    thread = threading.Thread(target=other)
    lock.run("step", act)
    thread.join()
    assert order == ["first", "other"]


def test_signals_are_deferred_in_few_calls() -> None:
    """Each block of a model defers them while it waits; an enumeration makes ten calls a signal."""
    calls = []
    with handler(lambda: None):
        deferred = SignalsDeferred()
        sys.setprofile(lambda _, event, __: calls.append(event) if event == "call" else None)
        try:
            with deferred:
                pass
        finally:
            sys.setprofile(None)
    assert len(calls) < 10


class Stealing:
    """torch 2.11: it takes no reference to a thread's object, and drops one when it goes."""

    def __init__(self) -> None:
        self.address: int | None = None

    def _stash_obj_in_tls(self, _: str, numbers: object) -> None:
        if self.address is not None:
            ctypes.pythonapi.Py_DecRef(ctypes.c_void_p(self.address))
        self.address = id(numbers)

    def _is_key_in_tls(self, _: str) -> bool:
        return False


def test_a_torch_that_takes_no_reference_is_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_lock, "_torch", Stealing())
    assert call_lock._steals()
    monkeypatch.setattr(call_lock, "_STEALS", True)
    numbers = [tuple(range(start, start + 3)) for start in (1000, 2000)]
    before = [sys.getrefcount(each) for each in numbers]
    for number in range(20):
        call_lock._tell_backward(numbers[number % 2])
    after = [sys.getrefcount(each) for each in numbers]
    assert after == [before[0], before[1] + 1]  # the last one is held


def test_calls_leave_the_objects_of_torch_alone() -> None:
    """By the references that this torch takes: one too few frees the tuple in use."""
    inside = (10**6, 10**6 + 1)
    before = sys.getrefcount(inside)
    for _ in range(10):
        call_lock._tell_backward(inside)
        assert sys.getrefcount(inside) == before + 1
        call_lock._tell_backward(())
    assert sys.getrefcount(inside) == before
