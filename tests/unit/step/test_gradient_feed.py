"""Backward waits for updates where more gradients than a window wait for theirs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tensorstow.base.tiers import Tier
from tensorstow.optim.adam import AdamW
from tensorstow.states.native_pipeline import StepRow
from tensorstow.step import backward_overlap
from tensorstow.step.gradient_feed import HostFeed, OverlapWith, StepFeeds
from tensorstow.step.share_tuner import ShareTuner

WIDTH = 512
NBYTES = WIDTH * WIDTH * 4
BY_HOST = {"updates_on_host": True, "updates_on_device": False}


class Updated:
    """A pipeline that has updated what was waited for."""

    def __init__(self) -> None:
        self.waited: list[int] = []

    def step(self, *_: object) -> None:
        """Begin."""

    def add_gradient(self, *_: object) -> None:
        """Take a gradient."""

    def wait_parameters(self, numbers: list[int]) -> None:
        self.waited += numbers

    def help(self) -> None:
        """Have nothing to update."""

    def close_step(self) -> None:
        """Learn that no more gradients come."""


class Of:
    """A chunk of these parameters."""

    def __init__(self, number: int, owners: list[int]) -> None:
        self.number, self.owners = number, owners


def test_the_oldest_that_can_be_is_waited_for() -> None:
    pipeline: Any = Updated()
    chunks: Any = [Of(0, [0, 1]), Of(1, [1]), Of(2, [2, 9])]
    feeds = StepFeeds(pipeline, chunks, {Tier.HOST: [HostFeed(pipeline)]}, ShareTuner((0.0,)))
    params: Any = [SimpleNamespace(number=n, tier=Tier.HOST, **BY_HOST) for n in range(3)]
    updates = [SimpleNamespace(param=param, gradient=None) for param in params]
    rows = [StepRow(expected=n < 3) for n in range(10)]
    plan: Any = SimpleNamespace(updates=updates, rows=rows, scalars=None, commits=False)
    feeds.begin(plan, OverlapWith.BACKWARD)
    feeds.offer(params[0], torch.ones(1))
    assert not feeds.wait_for_one([0])  # 1 shares its chunk, and may still come
    feeds.offer(params[2], torch.ones(1))
    assert feeds.wait_for_one([0, 2])  # 9 is not due
    feeds.offer(params[1], torch.ones(1))
    assert feeds.wait_for_one([0, 1])
    assert pipeline.waited == [2, 0]


class Copying:
    """The event of a copy."""

    is_complete = False

    def query(self) -> bool:
        return self.is_complete

    def synchronize(self) -> None:
        pytest.fail("nobody waits for a copy before the step is closed")


def test_a_gradient_that_is_being_copied_is_counted_apart_and_not_waited_for() -> None:
    pipeline: Any = Updated()
    chunks: Any = [Of(0, [0]), Of(1, [1])]
    feeds = StepFeeds(pipeline, chunks, {Tier.HOST: [HostFeed(pipeline)]}, ShareTuner((0.0,)))
    params: Any = [SimpleNamespace(number=n, tier=Tier.HOST, **BY_HOST) for n in range(2)]
    updates = [SimpleNamespace(param=param, gradient=None) for param in params]
    rows = [StepRow(expected=True) for _ in params]
    plan: Any = SimpleNamespace(updates=updates, rows=rows, scalars=None, commits=False)
    feeds.begin(plan, OverlapWith.BACKWARD)
    copies: Any = [Copying(), Copying()]
    for param, copied in zip(params, copies, strict=True):
        feeds.offer(param, torch.ones(5), copied)
    assert feeds.arriving_bytes == 2 * 20
    assert not feeds.wait_for_one([0, 1])
    copies[0].is_complete = True
    assert feeds.wait_for_one([0, 1])
    assert feeds.arriving_bytes == 20
    assert not feeds.wait_for_one([1])
    assert pipeline.waited == [0]


class Closed(HostFeed):
    """A feed that learns whether it is to wait."""

    waits: bool | None = None

    def close(self, sent: Callable[[], None], *, waits: bool = True) -> None:
        self.waits = waits
        sent()


@pytest.mark.parametrize("beside", OverlapWith)
def test_a_step_beside_a_forward_is_closed_without_waiting(beside: OverlapWith) -> None:
    pipeline: Any = Updated()
    feed = Closed(pipeline)
    feeds = StepFeeds(pipeline, [], {Tier.HOST: [feed]}, ShareTuner((0.0,)))
    rows = [StepRow(expected=True)]
    feeds.begin(SimpleNamespace(updates=[], rows=rows, scalars=None, commits=False), beside)
    feeds.close()
    assert feed.waits is not beside.goes_on_in_forward


class Driven(HostFeed):
    """A feed that somebody has to drive."""

    is_ended = False

    def wait(self, numbers: object) -> None:
        self.is_ended |= numbers is None


@pytest.mark.parametrize("commits", [False, True])
def test_a_step_that_commits_is_over_when_it_is_closed(*, commits: bool) -> None:
    """The thread that commits waits for its end, and cannot drive it."""
    pipeline: Any = Updated()
    feed = Driven(pipeline)
    chunks: Any = [Of(0, [0])]
    feeds = StepFeeds(pipeline, chunks, {Tier.HOST: [feed]}, ShareTuner((0.0,)))
    param: Any = SimpleNamespace(number=0, tier=Tier.HOST, **BY_HOST)
    updates = [SimpleNamespace(param=param, gradient=None)]
    rows = [StepRow(expected=True)]
    plan: Any = SimpleNamespace(updates=updates, rows=rows, scalars=None, commits=commits)
    feeds.begin(plan, OverlapWith.FORWARD)
    feeds.offer(param, torch.ones(1))
    feeds.close()
    assert feed.is_ended == commits


def trained(directory: Path, *, last: bool = True) -> AdamW:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12)]
    if not last:
        layers[3].unused = nn.Parameter(torch.ones(3))  # in a chunk with others
    model = nn.Sequential(*layers)
    optimizer = AdamW(
        model.parameters(),
        states="disk",
        dir=directory,
        durability="none",
        overlap="backward",
        module=model,
    )
    for _ in range(3):
        model(torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer._memory().gradient_bytes
    return optimizer


@pytest.mark.parametrize("last", [True, False])
def test_waiting_gradients_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, last: bool
) -> None:
    monkeypatch.setattr(backward_overlap, "WINDOW_BYTES", 3 * NBYTES)
    optimizer = trained(tmp_path, last=last)
    # What waits for another's gradient stays: one chunk's worth.
    assert optimizer._memory().gradient_bytes <= (3 + 1 + (0 if last else 1)) * NBYTES
    optimizer.close()


def test_without_a_window_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    wait_for_one = StepFeeds.wait_for_one

    def counted(self: StepFeeds, numbers: Sequence[int]) -> bool:
        waits.append(len(numbers))
        return wait_for_one(self, numbers)

    monkeypatch.setattr(StepFeeds, "wait_for_one", counted)
    monkeypatch.setattr(backward_overlap, "WINDOW_BYTES", 1 << 40)
    trained(tmp_path / "wide").close()
    assert not waits
    monkeypatch.setattr(backward_overlap, "WINDOW_BYTES", NBYTES - 1)
    trained(tmp_path / "none").close()
    assert waits  # a gradient that waits at all is more than that
