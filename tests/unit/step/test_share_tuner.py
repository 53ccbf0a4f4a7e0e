"""Which share the device gets: what is tried, what counts, and that it stays."""

import logging

import pytest
import torch

from tensorstow.base.update_on import UpdateOn, is_update_on, keyword_of, reaches_device
from tensorstow.states.chunks import Chunk
from tensorstow.states.layout import ChunkPlan, Family, Segment
from tensorstow.step.share_tuner import (
    ShareTuner,
    SideTiming,
    chunks_of_device,
    elements_of,
    share_tuner_of,
)

FP32 = Family(torch.float32, amsgrad=False)


def step(share_tuner: ShareTuner, *, host: float, device: float, commits: bool = False) -> float:
    """Take a step of a million elements on sides of these elements/s; return its share."""
    share = share_tuner.share
    there, here = round(1e6 * share), round(1e6 * (1 - share))
    timings = SideTiming(here, here / host), SideTiming(there, there / device)
    share_tuner.note(*timings, commits=commits)
    return share


@pytest.mark.parametrize(
    ("asked", "share"), [(None, 0.0), ("host", 0.0), ("device", 1.0), (0.3, 0.3)]
)
def test_what_is_said_is_not_tried(asked: UpdateOn | None, share: float) -> None:
    share_tuner = share_tuner_of(asked)
    assert share_tuner.is_final
    assert [step(share_tuner, host=1e6, device=1e3) for _ in range(4)] == [share] * 4
    assert not share_tuner.counts


@pytest.mark.parametrize(("host", "device", "wins"), [(1e6, 3e6, 1.0), (3e6, 1e6, 0.0)])
def test_auto_takes_the_faster_of_two_steps(
    host: float, device: float, wins: float, caplog: pytest.LogCaptureFixture
) -> None:
    share_tuner = share_tuner_of("auto")
    counted = []
    with caplog.at_level(logging.INFO, "tensorstow"):
        for expected in (0.0, 1.0, 0.0, 1.0):
            counted.append(share_tuner.counts)
            assert step(share_tuner, host=host, device=device) == expected
    assert counted == [False, False, True, True]
    assert share_tuner.is_final
    # What is slow later changes nothing.
    assert [step(share_tuner, host=device, device=host) for _ in range(3)] == [wins] * 3
    where = "device" if wins else "host"
    assert f"updates run on the {where}" in caplog.text


def test_hybrid_lets_both_sides_end_together(caplog: pytest.LogCaptureFixture) -> None:
    share_tuner = share_tuner_of("hybrid")
    with caplog.at_level(logging.INFO, "tensorstow"):
        shares = [step(share_tuner, host=2e6, device=6e6) for _ in range(5)]
    assert shares == pytest.approx([0.5, 0.5, 0.75, 0.75, 0.75])
    assert share_tuner.is_final
    assert step(share_tuner, host=9e6, device=1e6) == pytest.approx(0.75)
    assert "its share is 0.750" in caplog.text


def test_hybrid_goes_by_the_rates_of_its_own_share() -> None:
    """A side that is slower beside more of the other's work."""
    share_tuner = share_tuner_of("hybrid")
    step(share_tuner, host=1.0, device=1.0)
    step(share_tuner, host=2e6, device=6e6)
    step(share_tuner, host=4e6, device=6e6)
    assert share_tuner.is_final
    assert share_tuner.share == pytest.approx(0.6)


def test_a_side_without_work_says_nothing() -> None:
    share_tuner = share_tuner_of("hybrid")
    for _ in range(3):
        share_tuner.note(SideTiming(0, 1e-6), SideTiming(100, 1.0), commits=False)
    assert share_tuner.is_final
    assert share_tuner.share == 0.5


@pytest.mark.parametrize("asked", ["auto", "hybrid"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_steps_that_commit_are_not_compared_with_others(asked: UpdateOn, every: int) -> None:
    share_tuner = share_tuner_of(asked)
    fair = 1e6
    for number in range(1, 30):
        commits = number % every == 0
        # Every step that commits is slow: it must not decide, unless all are.
        slow = 0.01 if commits and every > 1 else 1.0
        step(share_tuner, host=fair * slow, device=2 * fair, commits=commits)
        if share_tuner.is_final:
            break
    assert share_tuner.is_final
    assert share_tuner.share == pytest.approx(1.0 if asked == "auto" else 2 / 3)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.75, 1.0])
def test_the_share_is_kept_all_along_the_chunks(share: float) -> None:
    chunks = [Chunk(ChunkPlan((Segment(n, 0, 64, 0),), 64), FP32) for n in range(40)]
    found = chunks_of_device(chunks, share)
    for count in range(1, 41):
        part = elements_of([c for c in chunks[:count] if c in found])
        assert abs(part - share * 64 * count) <= 64
    # More chunks change no side.
    assert chunks_of_device(chunks[:17], share) == [c for c in found if c in chunks[:17]]


def test_what_may_be_said() -> None:
    for given in ("host", "device", "hybrid", "auto", 0.5):
        assert is_update_on(given)
    for given in ("gpu", 0.0, 1.0, 1, True, None, float("nan"), ["host"]):
        assert not is_update_on(given)
    assert [reaches_device(w) for w in (None, "host", 0.5, "auto")] == [False, False, True, True]
    assert keyword_of(0.5) == "update_on=0.5"
    assert keyword_of("auto") == 'update_on="auto"'
