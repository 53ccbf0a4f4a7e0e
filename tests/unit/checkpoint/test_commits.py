"""A commit has all current values, whatever changed them, and nothing twice."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from crash.world import Case, World, differing, digest, undisturbed
from parity.cover import crossed
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import ForkError, LockedError, OptionError, PoisonedError
from tensorstow.checkpoint.commits import storage_of
from tensorstow.optim.runtime import _ENDS
from tensorstow.store.records import Generation

Made = tuple[AdamW, list[nn.Parameter]]
Change = Callable[[AdamW, list[nn.Parameter]], None]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def make(directory: Path | None, *, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Made:  # noqa: ANN401
    """Return an optimizer of four parameters in chunks of 64 elements, and these."""
    generator = torch.Generator().manual_seed(5)
    weights = [
        nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (150, 40, 1, 100)
    ]
    stowed: dict[str, Any] = {}
    if directory is not None:
        stowed = {"states": "disk", "dir": directory, "commit_every": None, **given}
    policy = PipelinePolicy(chunk_elements=64, backend="threads", depth=2)
    return AdamW(weights, lr=1e-2, policy=policy, **stowed), weights


def step(optimizer: AdamW, weights: list[nn.Parameter], *which: int) -> None:
    """Step with gradients for the parameters ``which``, else for all."""
    for index, weight in enumerate(weights):
        wanted = not which or index in which
        weight.grad = torch.cos(weight.detach() * 7 + index) if wanted else None
    optimizer.step()


def facts(optimizer: AdamW, weights: list[nn.Parameter]) -> str:
    optimizer.wait()
    return digest([[w.detach() for w in weights], optimizer.state_dict()])


@pytest.mark.timeout(60)
def test_an_optimizer_that_is_collected_by_the_thread_that_commits_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that a traceback holds is, sooner or later: that thread waits for no commit."""
    optimizer, weights = make(tmp_path, commit_every=1)
    step(optimizer, weights)
    storage = storage_of(optimizer._params()).store
    commit = storage.commit
    is_dropped, collected_in = threading.Event(), list[str]()

    def collect_first(*given: Any, **named: Any) -> Generation:  # noqa: ANN401
        assert is_dropped.wait(30)
        gc.collect()
        collected_in.append(threading.current_thread().name)
        return commit(*given, **named)

    monkeypatch.setattr(storage, "commit", collect_first)
    gc.disable()
    try:
        step(optimizer, weights)
        ring = [optimizer]
        ring.append(ring)  # type: ignore[arg-type]  # a cycle, for the collector to find
        watcher = weakref.ref(optimizer._runtime)
        del optimizer, ring
        is_dropped.set()
        while watcher() is not None or not collected_in:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert collected_in[0].startswith("tensorstow-commit")
    while _ENDS:
        time.sleep(0.01)
    again, weights = make(tmp_path, commit_every=1)
    assert again.resume() == 2
    again.close()


@pytest.mark.timeout(60)
def test_an_optimizer_in_a_cycle_commits_after_its_thread_has_committed_before(
    tmp_path: Path,
) -> None:
    """The collector ends a thread pool that is collected too before it calls any finalizer."""
    optimizer, weights = make(tmp_path, commit_every=2)
    for _ in range(3):
        step(optimizer, weights)
    optimizer.me = optimizer  # type: ignore[attr-defined]
    del optimizer
    gc.collect()
    again, weights = make(tmp_path)
    assert again.resume() == 3
    again.close()


def nothing(optimizer: AdamW, weights: list[nn.Parameter]) -> None:
    del optimizer, weights


def some_step(optimizer: AdamW, weights: list[nn.Parameter]) -> None:
    step(optimizer, weights, 0, 2)


def write_a_weight(optimizer: AdamW, weights: list[nn.Parameter]) -> None:
    optimizer.wait()
    with torch.no_grad():
        weights[0].mul_(1.5)
        weights[3].fill_(0.25)


def load_a_state(optimizer: AdamW, weights: list[nn.Parameter]) -> None:
    del weights
    saved = optimizer.state_dict()
    for entry in saved["state"].values():
        entry["exp_avg"] = entry["exp_avg"] * 0.5
        entry["step"] = entry["step"] + 3
    optimizer.load_state_dict(saved)


def change_the_rate(optimizer: AdamW, weights: list[nn.Parameter]) -> None:
    del weights
    optimizer.param_groups[0]["lr"] = torch.tensor(3e-2)
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    optimizer.param_groups[0]["note"] = {"of": ("the", "user"), 3: None}


def transplant(optimizer: AdamW, weights: list[nn.Parameter]) -> None:
    optimizer.wait()
    optimizer.state[weights[1]] = {
        "step": torch.tensor(4.0),
        "exp_avg": torch.full_like(weights[1], 0.1),
        "exp_avg_sq": torch.full_like(weights[1], 0.2),
    }
    step(optimizer, weights, 1)


CHANGES = [nothing, some_step, write_a_weight, load_a_state, change_the_rate, transplant]


@crossed(
    change=CHANGES,
    begun=((), (0,), (0, 1, 2, 3)),
    dtype=(torch.float32, torch.bfloat16),
    budget=(None, "1MiB"),
)
def test_a_commit_holds_what_is(
    change: Change, begun: tuple[int, ...], dtype: torch.dtype, budget: str | None, tmp_path: Path
) -> None:
    """Uninterrupted beside resumed after each commit; each commits twice with a change between."""
    ram, ram_weights = make(None, dtype=dtype)
    optimizer, weights = make(tmp_path, dtype=dtype, ram_budget=budget)
    for _ in range(2):
        for one, its in ((ram, ram_weights), (optimizer, weights)):
            for _ in range(2 if begun else 0):
                step(one, its, *begun)
            if begun or change in {nothing, write_a_weight, change_the_rate}:
                change(one, its)
        optimizer.commit()
        optimizer.commit()  # once more, of the same
        before = facts(optimizer, weights)
        if change is not write_a_weight:  # a master in RAM is seeded at the next step
            assert before == facts(ram, ram_weights)
        optimizer.close()
        optimizer, weights = make(tmp_path, dtype=dtype, ram_budget=budget)
        assert optimizer.resume() == optimizer._runtime.commits.step
        assert facts(optimizer, weights) == before
        optimizer.commit()  # of what was resumed and not touched
        optimizer.close()
        optimizer, weights = make(tmp_path, dtype=dtype, ram_budget=budget)
        optimizer.resume()
        assert facts(optimizer, weights) == before
    for one, its in ((ram, ram_weights), (optimizer, weights)):
        step(one, its)
        step(one, its, 3)
    assert facts(optimizer, weights) == facts(ram, ram_weights)
    optimizer.close()


def test_gradients_never_came_and_then_do(tmp_path: Path) -> None:
    ram, ram_weights = make(None)
    for round_ in range(4):
        optimizer, weights = make(tmp_path, ram_budget="1MiB" if round_ % 2 else None)
        optimizer.resume()
        for one, its in ((ram, ram_weights), (optimizer, weights)):
            step(one, its, round_)  # one more parameter begins in each round
        optimizer.commit()
        optimizer.close()
    optimizer, weights = make(tmp_path)
    assert optimizer.resume() == 4
    assert facts(optimizer, weights) == facts(ram, ram_weights)
    optimizer.close()


def test_a_step_that_a_scaler_skips(tmp_path: Path) -> None:
    optimizer, weights = make(tmp_path, commit_every=1, dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    ends = []
    for number in range(4):
        scaler.scale(torch.zeros(()))
        for weight in weights:
            weight.grad = torch.full_like(weight, torch.inf if number == 2 else 4 * 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.synchronize()
        ends.append(facts(optimizer, weights))
    assert optimizer.snapshots() == []
    assert ends[1] == ends[2]
    optimizer.commit({"scaler": scaler.state_dict()})
    optimizer.close()
    optimizer, weights = make(tmp_path, dtype=torch.float16)
    assert optimizer.resume() == 4
    assert facts(optimizer, weights) == ends[3]
    assert optimizer.extra == {"scaler": scaler.state_dict()}
    optimizer.close()


def test_a_group_that_was_added_is_there_to_be_added_again(tmp_path: Path) -> None:
    def run(directory: Path | None, *, added: bool, steps: int) -> tuple[str, AdamW]:
        optimizer, weights = make(directory)
        extra = nn.Parameter(torch.linspace(0, 1, 90))
        if added:
            optimizer.add_param_group({"params": [extra], "lr": 0.5})
            weights = [*weights, extra]
        start = (directory and optimizer.resume()) or 0
        for number in range(start, steps):
            if number == 3 and not added:
                optimizer.add_param_group({"params": [extra], "lr": 0.5})
                weights = [*weights, extra]
            step(optimizer, weights)
        return facts(optimizer, weights), optimizer

    wanted, _ = run(None, added=False, steps=8)
    _, optimizer = run(tmp_path, added=False, steps=5)
    optimizer.commit()
    optimizer.close()
    with pytest.raises(OptionError, match="2 parameter groups"):
        run(tmp_path, added=False, steps=8)
    found, optimizer = run(tmp_path, added=True, steps=8)
    assert found == wanted
    optimizer.close()


def test_a_parameter_that_was_unfrozen_on_the_way(tmp_path: Path) -> None:
    def run(directory: Path | None, steps: int, *, commit: bool = False) -> str:
        optimizer, weights = _frozen(directory)
        start = (directory and optimizer.resume()) or 0
        for number in range(start, steps):
            weights[1].requires_grad_(number >= 3)
            step(optimizer, weights, *((0, 1, 2, 3) if number >= 3 else (0, 2, 3)))
        if commit:
            optimizer.commit()
        found = facts(optimizer, weights)
        optimizer.close()
        return found

    wanted = run(None, 8)
    run(tmp_path, 5, commit=True)
    assert run(tmp_path, 8) == wanted


def _frozen(directory: Path | None) -> tuple[AdamW, list[nn.Parameter]]:
    weights = [nn.Parameter(torch.linspace(-1, 1, n)) for n in (150, 40, 1, 100)]
    weights[1].requires_grad_(requires_grad=False)
    given: dict[str, Any] = {}
    if directory is not None:
        given = {"states": "disk", "dir": directory, "commit_every": None}
    return AdamW(weights, policy=PipelinePolicy(chunk_elements=64), **given), weights


def test_frozen_parameters_and_buffers_of_the_module(tmp_path: Path) -> None:
    def make_all() -> tuple[nn.Module, AdamW]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[0].requires_grad_(requires_grad=False)
        model.register_buffer("gone", torch.zeros(3), persistent=False)
        model.register_buffer("flags", torch.tensor([True, False]))
        model.register_buffer("empty", torch.zeros(0, dtype=torch.int64))
        given: dict[str, Any] = {"states": "disk", "dir": tmp_path, "commit_every": 1}
        return model, AdamW(model.parameters(), module=model, **given)

    model, optimizer = make_all()
    for number in range(3):
        with torch.no_grad():
            model[0].weight.add_(number)
            model.flags.logical_not_()
            model.gone.add_(1)
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    wanted = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer.close()
    model, optimizer = make_all()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9)
    assert optimizer.resume() == 3
    assert digest(model.state_dict()) == digest(wanted)
    assert model.gone.sum() == 0
    optimizer.close()


def test_a_run_is_not_buried_by_accident(tmp_path: Path) -> None:
    optimizer, weights = make(tmp_path)
    step(optimizer, weights)
    optimizer.commit()
    committed = facts(optimizer, weights)
    optimizer.close()
    attempts: list[Change] = [
        step,
        lambda o, _: o.commit(),  # type: ignore[arg-type, return-value]
        lambda o, _: o.snapshot("here"),
    ]
    for attempt in attempts:
        optimizer, weights = make(tmp_path)
        untouched = digest([w.detach() for w in weights])
        with pytest.raises(OptionError, match=r"committed at step 1. Call resume\(\) first"):
            attempt(optimizer, weights)
        assert digest([w.detach() for w in weights]) == untouched
        optimizer.close()
    optimizer, weights = make(tmp_path)
    assert optimizer.resume() == 1
    assert facts(optimizer, weights) == committed
    optimizer.close()


@pytest.fixture(name="open_step")
def make_open_step(tmp_path: Path) -> Iterator[World]:
    world = World(Case(overlap="backward", commit_every=1), tmp_path)
    world.train(2)
    world.backward()
    yield world
    world.close()


@pytest.mark.parametrize("call", ["commit", "snapshot"])
def test_an_open_step_is_ended_first(call: str, open_step: World) -> None:
    arguments = ["name"] if call == "snapshot" else []
    with pytest.raises(OptionError, match=r"backward has ended, and step\(\) was not called"):
        getattr(open_step.optimizer, call)(*arguments)
    open_step.optimizer.step()
    assert open_step.optimizer.commit() == 3


def test_an_open_step_is_given_up_for_what_is_resumed(open_step: World) -> None:
    with pytest.raises(OptionError, match="There are"):
        open_step.optimizer.resume("none")
    with pytest.raises(OptionError, match=r"backward has ended, and step\(\) was not called"):
        open_step.optimizer.commit()  # what was refused has ended nothing
    assert open_step.resume() == 2
    assert differing(open_step.facts(), undisturbed("split")[2]) == []
    open_step.train(4)
    assert differing(open_step.facts(), undisturbed("split")[4]) == []


def test_two_holders_are_one_too_many(tmp_path: Path) -> None:
    optimizer, _ = make(tmp_path)
    with pytest.raises(LockedError, match=f"pid {os.getpid()}"):
        make(tmp_path)
    optimizer.close()
    optimizer, _ = make(tmp_path)
    optimizer.close()


def test_a_forked_child_commits_nothing(tmp_path: Path) -> None:
    optimizer, weights = make(tmp_path)
    step(optimizer, weights)
    optimizer.commit()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"nothing was refused"
        try:
            optimizer.commit()
        except ForkError:
            said = b"ForkError"
        except BaseException as error:  # noqa: BLE001  # the parent shall see it
            said = repr(error).encode()
        os.write(write, said)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 1000) == b"ForkError"
    os.close(read)
    os.close(write)
    with pytest.raises(LockedError):
        make(tmp_path)
    step(optimizer, weights)
    assert optimizer.commit() == 2
    optimizer.close()


def test_scratch_has_nothing_to_commit(tmp_path: Path) -> None:
    optimizer, weights = make(tmp_path, durability="none")
    step(optimizer, weights)
    calls: dict[str, Callable[[], object]] = {
        "commit": optimizer.commit,
        "resume": optimizer.resume,
        "snapshot": lambda: optimizer.snapshot("one"),
        "snapshots": optimizer.snapshots,
        "drop": lambda: optimizer.drop("one"),
    }
    for name, call in calls.items():
        asked = rf'^{name}\(\) was requested, .* scratch.* dir=.* durability="commit"'
        with pytest.raises(OptionError, match=asked):
            call()
    optimizer.close()
    with pytest.raises(PoisonedError):
        optimizer.step()
