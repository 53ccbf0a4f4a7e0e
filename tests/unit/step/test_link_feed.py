"""One step on the device: what is asked of the updater, and what is left behind it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from remote import make_remote
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError, StowError
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.layout import Segment
from tensorstow.step.device_updater import DeviceUpdater
from tensorstow.step.link_feed import LinkFeed
from tensorstow.step.segment_update import SegmentUpdate

SMALL = PipelinePolicy(chunk_elements=1024)


def made(patch: pytest.MonkeyPatch, **given: object) -> tuple[dict[str, nn.Parameter], StowedAdam]:
    make_remote(patch)
    weights = {
        "wide": nn.Parameter(torch.ones(40, 50)),
        "half": nn.Parameter(torch.ones(30).bfloat16()),
        "unused": nn.Parameter(torch.ones(7)),
    }
    groups = [
        {"params": [weights["wide"], weights["unused"]]},
        {"params": [weights["half"]], "lr": 0.5, "maximize": True},
    ]
    optimizer = AdamW(groups, lr=0.25, update_on="device", states="disk", policy=SMALL, **given)  # type: ignore[arg-type]
    return weights, optimizer


def test_the_updater_is_told_what_the_kernel_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer = made(monkeypatch)
    weights["wide"].grad = torch.arange(2000.0).view(50, 40).t()
    weights["half"].grad = torch.ones(30, dtype=torch.bfloat16)
    updates: dict[int, list[SegmentUpdate]] = {}
    segment_of = DeviceUpdater._segment

    def recorded(self: DeviceUpdater, run: Segment) -> SegmentUpdate:
        segment = segment_of(self, run)
        updates.setdefault(run.parameter, []).append(
            replace(segment, gradient=segment.gradient.clone())
        )
        return segment

    monkeypatch.setattr(DeviceUpdater, "_segment", recorded)
    optimizer.step()
    wide, half = (optimizer._params().get(weights[n]).number for n in ("wide", "half"))
    assert updates.keys() == {wide, half}
    pieces = sorted(updates[wide], key=lambda segment: segment.first)
    assert torch.equal(torch.cat([s.gradient for s in pieces]), weights["wide"].grad.reshape(-1))
    first, (only,) = pieces[0], updates[half]
    assert (first.scalars.grad_factor, only.scalars.grad_factor) == (1.0, -1.0)
    assert only.scalars.step_size == pytest.approx(5.0)
    assert only.seed_master  # nobody has written it yet
    assert not first.seed_master
    assert only.key != first.key


def test_fp32_weights_stay_up_until_somebody_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, optimizer = made(monkeypatch, dir=tmp_path, commit_every=None)
    params = optimizer._params()
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    stale = {n: params.get(w).host_weight.is_stale for n, w in weights.items()}  # type: ignore[union-attr]
    assert stale == {"wide": True, "half": False, "unused": True}
    number = params.get(weights["wide"]).number
    assert torch.equal(params.weight(number), weights["wide"])
    optimizer.step()
    optimizer.commit()
    assert not any(params.get(w).host_weight.is_stale for w in weights.values())  # type: ignore[union-attr]
    optimizer.close()


def test_whoever_frees_the_model_of_gradients_steps_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, optimizer = made(monkeypatch)
    before = {n: w.detach().clone() for n, w in weights.items()}
    optimizer.step()  # nobody has a gradient
    assert all(torch.equal(w, before[n]) for n, w in weights.items())
    weights["wide"].grad = torch.ones(40, 50)
    optimizer.step()
    changed = {n: not torch.equal(w, before[n]) for n, w in weights.items()}
    assert changed == {"wide": True, "half": False, "unused": False}
    assert optimizer.state[weights["wide"]]["step"] == 1


def test_a_model_that_leaves_the_device_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights, optimizer = made(monkeypatch)
    weights["wide"].grad = torch.ones(40, 50)
    monkeypatch.undo()
    with pytest.raises(OptionError, match=r"Parameter 0 of group 0 .*Move the model first"):
        optimizer.step()


def feed_of(optimizer: StowedAdam) -> LinkFeed:
    (updater,) = optimizer._params().update_router.updaters
    return updater


def test_a_stage_is_followed_by_no_other_than_its_next(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer = made(monkeypatch)
    weights["wide"].grad = torch.ones(40, 50)
    optimizer.step()
    feed = feed_of(optimizer)
    assert feed.is_over
    feed.move_on()  # nothing is left
    with pytest.raises(StowError, match="cannot go on to CLOSED: no step is under way"):
        feed.close(lambda: None)


def test_a_feed_takes_gradients_of_its_own_chunks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, optimizer = made(monkeypatch)
    feed, chunks = feed_of(optimizer), optimizer._states().chunks
    wide, half = (optimizer._params().get(weights[n]) for n in ("wide", "half"))
    served = [chunk for chunk in chunks if wide.number in chunk.owners]
    feed.serve(served)
    assert feed.elements == sum(chunk.plan.elements for chunk in served)
    for param in (wide, half):
        feed.offer(param, torch.ones(param.numel))
    assert [feed.needs(param.number) for param in (wide, half)] == [True, False]
