"""A commit that nobody asked for is of the end of the last step, whatever was begun since."""

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import children
import tensorstow
from compare import all_equal
from interrupts import Interrupt, at_event, by_signal, handler, raise_it
from ranks.stowed import groups_of, loss_of, model_of
from stopped import stop
from tensorstow import AdamW, Plan
from tensorstow.checkpoint import small_values
from tree import TESTS

LAST = 8
DIES = 4
MOMENTS = ["batch", "forward", "backward", "step", "schedule", "average"]


class Stop(Exception):  # noqa: N818  # no error
    """Ends a run, as an error of the user's would."""


class Run:
    """A loop with all that a program keeps besides weights and states."""

    def __init__(self, directory: Path, **given: Any) -> None:  # noqa: ANN401  # passed on
        torch.manual_seed(1)
        self.model = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 4)
        )
        given = {"commit_every": 3, "extra": self.extra, "module": self.model, **given}
        self.optimizer = AdamW(
            self.model.parameters(), lr=1e-2, states="disk", dir=directory, **given
        )
        # Recursive: a rate of another moment than the schedule's would stay wrong.
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        torch.manual_seed(5)
        self.start = self.resume()

    def extra(self) -> dict[str, Any]:
        return {
            "random": torch.get_rng_state(),
            "schedule": self.schedule.state_dict(),
            "average": self.average.state_dict(),
        }

    def resume(self) -> int:
        start = self.optimizer.resume()
        if start is None:
            return 0
        extra = self.optimizer.extra
        torch.set_rng_state(extra["random"])
        self.schedule.load_state_dict(extra["schedule"])
        self.average.load_state_dict(extra["average"])
        if self.schedule.last_epoch < start:
            self.schedule.step()
        if self.average.n_averaged < start:
            self.average.update_parameters(self.model)
        return start

    def train(self, until: int, dies: str | None = None) -> None:
        """Take steps; raise Stop in step ``DIES``, behind what ``dies`` names."""
        parts: dict[str, Callable[[Any], Any]] = {
            "batch": lambda _: torch.randn(6, 8),
            "forward": lambda batch: self.model(batch).square().mean(),
            "backward": lambda loss: loss.backward(),
            "step": lambda _: self.optimizer.step(),
            "schedule": lambda _: self.schedule.step(),
            "average": lambda _: self.average.update_parameters(self.model),
        }
        for step in range(self.start, until):
            value = None
            for name, act in parts.items():
                value = act(value)
                if name == dies and step == DIES:
                    raise Stop
            self.optimizer.zero_grad()

    def facts(self) -> list[torch.Tensor]:
        self.optimizer.wait()
        states = self.optimizer.state_dict()["state"].values()
        return [
            *(t.clone() for t in self.model.state_dict().values()),
            *(t.clone() for t in self.average.state_dict().values()),
            *(t for entry in states for t in entry.values()),
            torch.tensor(self.schedule.get_last_lr()),
            torch.get_rng_state(),
        ]


def stopped(optimizer: AdamW, act: Callable[[], object]) -> None:
    """Let Stop be raised in the optimizer's block, after ``act`` at the latest."""

    def run() -> None:
        with optimizer:
            act()
            raise Stop

    with pytest.raises(Stop):
        run()


def by_with(run: Run, dies: str) -> None:
    with run.optimizer:
        run.train(LAST, dies)


def by_finally(run: Run, dies: str) -> None:
    try:
        run.train(LAST, dies)
    finally:
        run.optimizer.close()


def by_nothing(run: Run, dies: str) -> None:
    run.train(LAST, dies)


@pytest.fixture(scope="module", name="undisturbed")
def make_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    run = Run(tmp_path_factory.mktemp("undisturbed"))
    run.train(LAST)
    facts = run.facts()
    run.optimizer.close()
    return facts


def went_on(directory: Path, **given: Any) -> tuple[int, list[torch.Tensor]]:  # noqa: ANN401
    """Return the step that a run goes on from, and what it ends with."""
    run = Run(directory, **given)
    run.train(LAST)
    facts = run.facts()
    stop(run.optimizer)
    return run.start, facts


@pytest.mark.parametrize(
    ("end", "dies"),
    [*((by_with, dies) for dies in MOMENTS), (by_finally, "forward"), (by_nothing, "batch")],
)
def test_a_run_that_an_exception_ended_goes_on_bit_for_bit(
    end: Callable[[Run, str], None], dies: str, tmp_path: Path, undisturbed: list[torch.Tensor]
) -> None:
    def run() -> None:
        with pytest.raises(Stop):
            end(Run(tmp_path), dies)

    run()
    gc.collect()
    start, facts = went_on(tmp_path)
    assert start == DIES + (dies in {"step", "schedule", "average"})
    assert all_equal(facts, undisturbed)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_an_interrupt_anywhere_in_a_step_keeps_the_step(
    overlap: str, tmp_path: Path, undisturbed: list[torch.Tensor]
) -> None:
    """Ctrl-C comes mostly in step(), which takes the most time."""
    starts = set()

    def interrupted(number: int, directory: Path) -> bool:
        run = Run(directory, overlap=overlap)
        run.train(DIES)
        torch.autograd.backward(run.model(torch.randn(6, 8)).square().mean())
        is_there = True

        def step() -> None:
            nonlocal is_there
            try:
                is_there = at_event(number, by_signal, run.optimizer.step)
            except Interrupt as interrupt:
                raise Stop from interrupt

        stopped(run.optimizer, step)
        return is_there

    with handler(raise_it):
        number = 1
        while interrupted(number, tmp_path / f"{number}"):
            start, facts = went_on(tmp_path / f"{number}", overlap=overlap)
            starts.add(start)
            assert all_equal(facts, undisturbed), number
            number += 199
    # Backward has begun the step: without its end, the newest commit is that of step 3.
    assert starts == {3 if overlap == "backward" else DIES, DIES + 1}


SCRIPT = """
import sys
sys.path[:0] = sys.argv[2].split(":")
from pathlib import Path
import torch
from test_small_values import LAST, Run
torch.set_num_threads(int(sys.argv[3]))  # sums of the forward depend on it
run = Run(Path(sys.argv[1]))
run.train(LAST, "forward")
"""


def test_the_interpreter_s_end_commits_the_last_step_s_end(
    tmp_path: Path, undisturbed: list[torch.Tensor]
) -> None:
    words = (f"{TESTS}:{Path(__file__).parent}", str(torch.get_num_threads()))
    done = children.run("-c", SCRIPT, tmp_path, *words, teardown=True, check=False)
    assert done.stderr.splitlines()[-1].endswith("Stop")
    start, facts = went_on(tmp_path)
    assert start == DIES
    assert all_equal(facts, undisturbed)


def test_close_commits_the_values_of_its_line(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(5)
    with torch.no_grad():
        run.model[0].weight.clamp_(-0.1, 0.1)
    at_line = run.facts()
    run.optimizer.close()
    again = Run(tmp_path)
    assert (again.start, again.schedule.last_epoch) == (5, 5)
    assert all_equal(again.facts(), at_line)
    again.optimizer.close()


def write_a_weight(run: Run) -> None:
    with torch.no_grad():
        run.model[3].weight.clamp_(-0.1, 0.1)


def exchange_a_weight(run: Run) -> None:
    """As averages are put in for an evaluation."""
    run.model[3].weight.data = run.average.module[3].weight.data.clone()


def write_a_frozen_weight(run: Run) -> None:
    with torch.no_grad():
        run.model[0].bias.mul_(0.5)


def add_a_group(run: Run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


def load_states(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (write_a_weight, "weights or buffers were written"),
        (exchange_a_weight, "weights or buffers were written"),
        (write_a_frozen_weight, "weights or buffers were written"),
        (add_a_group, "a parameter group was added"),
        (load_states, "states were loaded"),
    ],
)
def test_what_is_of_two_moments_is_not_committed_and_said(
    change: Callable[[Run], None], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path)
    run.model[0].bias.requires_grad_(requires_grad=False)
    run.train(5)
    stopped(run.optimizer, lambda: change(run))
    assert f"2 steps since the last commit of {tmp_path} are not committed: {reason}" in caplog.text
    again = AdamW(run.model.parameters(), states="disk", dir=tmp_path)
    assert again.resume() == 3
    again.close()


def slow() -> Mapping[str, Any]:
    time.sleep(0.02)
    return {}


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        (lambda: {"average": torch.zeros(5 << 20)}, "20.0 MiB, too much to copy at each step"),
        (slow, "takes too long"),
    ],
    ids=["large", "slow"],
)
def test_an_extra_that_costs_much_is_left_to_scheduled_commits(
    extra: Callable[[], Mapping[str, Any]],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if extra is slow:
        monkeypatch.setattr(small_values, "_FREE_SECONDS", 0.01)
    calls = 0

    def counted() -> Mapping[str, Any]:
        nonlocal calls
        calls += 1
        return extra()

    model = nn.Linear(4, 4)
    optimizer = AdamW(model.parameters(), states="disk", dir=tmp_path, extra=counted)

    def train() -> None:
        for _ in range(5):
            torch.autograd.backward(model(torch.ones(2, 4)).sum())
            optimizer.step()

    stopped(optimizer, train)
    assert "5 steps since" in caplog.text
    assert reason in caplog.text
    assert calls < 5 or extra is not slow
    assert optimizer._runtime.commits.step_end.kept is None


def test_one_of_several_processes_does_not_call_extra_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Replicas have a directory each, and extra() may gather from all of them."""
    run = Run(tmp_path)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    stopped(run.optimizer, lambda: run.train(5))
    assert "extra() of several processes is called by scheduled commits alone" in caplog.text


def test_an_error_of_extra_is_raised_by_the_step_that_it_belongs_to(tmp_path: Path) -> None:
    is_broken = False

    def extra() -> dict[str, Any]:
        if is_broken:
            raise Stop
        return {}

    run = Run(tmp_path, extra=extra)
    run.start = 0
    run.train(1)
    is_broken = True
    with pytest.raises(Stop):
        run.train(1)
    is_broken = False
    run.train(1)  # it is whole, and goes on
    assert run.optimizer.commit() == 3
    run.optimizer.close()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parameters", ["device", "host", "disk"])
def test_every_placement_tells_its_own_writes_from_the_users(
    parameters: str, dtype: torch.dtype, tmp_path: Path, *, frozen: bool
) -> None:
    model = model_of(dtype)
    model.blocks[1].requires_grad_(not frozen)
    make = partial(groups_of, dir=tmp_path, extra=dict)
    plan = Plan(parameters=parameters, states="disk")  # type: ignore[arg-type]
    model, optimizer = tensorstow.stow(model, make, plan=plan)

    for step in range(2):
        loss_of(model, 0, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
    stopped(optimizer, lambda: loss_of(model, 0, 2, 0).backward())
    assert optimizer._runtime.commits.committed == 2
