"""Every plan on the simulated accelerator, whose time is counted: a step against what bounds it.

Link, host memory, disk and compute have the ratios of a machine with a link of 25 GB/s, memory of
100 GB/s and disks of 14 GB/s, a thousand times slower, so that what the host needs itself is little
beside it: threads that sleep do the waiting. Compute is such that break-even is met: the time that
a schedule lets updates run beside (forward: a third of it; backward: two thirds; the disk works
beside all of it) is as long as the slowest of the others. So compute takes 3 times (forward) or 1.5
times (backward) as long as the update where nothing else is slower, and a step as long as compute
where nothing serialises: the limits hold there alone, and each figure's name says how many times it
is. With overlap "none" updates run beside nothing, by what it promises. Clipped trainings have a
disk as slow as compute, and buffers of a tenth of the states. Where the device updates, states take
the link's time, and the update itself none: the simulated device counts products of matrices and
copies. What the host does is not simulated, and other work on the machine makes steps longer:
figures are of a machine that does nothing else.

    python benchmarks/run.py accelerator_model   # Chrome traces: build/accelerator_model/*.json
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.accelerator.accelerator_child import DRAM_BYTES, RunConfig
from benchmarks.accelerator.bounds import COMPUTE, DISK, DOWN, DRAM, UP, Bound
from benchmarks.measure import Figure, Settings, at_most, lines_of, not_available
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap, UpdateOn

_ROOT = Path(__file__).resolve().parents[2]
_TRACES = _ROOT / "build" / "accelerator_model"
_RATES = {"link": 25e6, "dram": 100e6, "disk": 14e6}
_WINDOW = {"none": 1.0, "forward": 3.0, "backward": 1.5, "speculative": 1.5}
"""Compute over the part of it that updates run beside; 1: what is left of backward's goes on."""
_STATE_BYTES = 20
"""Of a bf16 parameter, read and written."""
_WEIGHT_BYTES = 8
"""Of one on disk: read for forward and backward, and for the update; written."""
_DOWN_BYTES = {Tier.HOST: 14, Tier.DISK: 12}
"""Of a bf16 parameter that the device updates: m, v, master (on disk its low half) and weight."""
_LIMITS = {Tier.DEVICE: 1.05, Tier.HOST: 1.10, Tier.DISK: 1.15}
_ONE_OF, _CLIPPED = 20, 1.10
"""Of a training that clips one step of so many."""
_SMALL_RING = "1MiB"
_LONGEST = 1200


def figures(settings: Settings) -> Iterator[Figure]:
    """Train by every plan; compare a step with its bound."""
    if torch.accelerator.is_available():
        why = "there is an accelerator here, on which `gpu` measures"
        yield not_available("a step on the simulated accelerator / its bound", None, why)
        return
    configs = [_config(plan, quick=settings.quick) for plan in _plans(quick=settings.quick)]
    configs += _clipped(quick=settings.quick)
    printed = lines_of(
        "benchmarks.accelerator.accelerator_child",
        str(settings.scratch(1 << 30)),
        seconds=_LONGEST,
        text=json.dumps({"configs": [asdict(config) for config in configs]}),
    )
    lines = [line for line in printed if line.startswith("{")]
    for config, line in zip(configs, lines, strict=True):
        found = json.loads(line)
        if not settings.quick:
            _save_trace(_name_of(config), found["spans"])
        yield _figure(config, found)


def _plans(*, quick: bool) -> Iterator[Plan]:
    overlaps: tuple[Overlap, ...] = ("none", "forward", "backward")
    for parameters in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        for states in (Tier.HOST, Tier.DISK):
            for overlap in overlaps[-1:] if quick else overlaps:
                yield Plan(parameters=parameters, states=states, overlap=overlap)
    sides: tuple[UpdateOn, ...] = ("device", "hybrid", "auto")
    for states in (Tier.HOST, Tier.DISK):
        for update_on in sides:
            for beside in ("backward",) if quick else ("none", "backward"):
                yield Plan(
                    parameters=Tier.DEVICE, states=states, overlap=beside, update_on=update_on
                )


def _clipped(*, quick: bool) -> Iterator[RunConfig]:
    """Yield trainings that clip no step, one of twenty, or each one."""
    ways: list[tuple[Overlap, int]] = [("forward", 0)]
    ways += [("speculative", period) for period in (0, 20, 1)]
    for parameters in (Tier.DEVICE, Tier.HOST, Tier.DISK):
        nbytes = _STATE_BYTES + _WEIGHT_BYTES * (parameters == Tier.DISK)
        for overlap, period in ways[-1:] if quick else ways:
            budget = None if quick else _SMALL_RING  # it would hold all states of a small model
            plan = Plan(parameters=parameters, states=Tier.DISK, overlap=overlap, ram_budget=budget)
            config = _config(plan, quick=quick)
            steps = max(config.steps, 0 if quick else period)
            compute = nbytes * config.elements / config.disk
            yield replace(config, steps=steps, compute=compute, clip_period=period)


def _config(plan: Plan, *, quick: bool) -> RunConfig:
    on_disk = Tier.DISK in {plan.parameters, plan.states}
    layers, width = (2, 32) if quick else (20, 72 if on_disk else 112)
    rates = {name: rate * (1000 if quick else 1) for name, rate in _RATES.items()}
    steps = 3 if on_disk else 4
    config = RunConfig(
        plan.to_json(), layers, width, chunk=1 << 14, compute=0.0, steps=steps, **rates
    )
    elements = config.elements
    up = 2 if plan.parameters == Tier.DEVICE else 4  # new weights; or what both passes gather
    link = max(2, up) * elements / config.link
    nbytes = _STATE_BYTES * (plan.states == Tier.DISK) + _WEIGHT_BYTES * (
        plan.parameters == Tier.DISK
    )
    goes_on = plan.parameters != Tier.DISK and plan.update_on is None
    window = 1.0 if plan.timing.begins_early and goes_on else _WINDOW[plan.overlap]
    beside = window * _update_seconds(config)
    compute = max(link, beside, nbytes * elements / config.disk)
    return RunConfig(**{**asdict(config), "compute": compute})


def _update_seconds(config: RunConfig) -> float:
    """Return what updates take by host memory or the link, on the sides that the plan asks for."""
    host = DRAM_BYTES * config.elements / config.dram
    plan = Plan.from_json(config.plan)
    device = _DOWN_BYTES[plan.states] * config.elements / config.link
    if plan.update_on == "device":
        return device
    if plan.update_on == "auto":
        return min(host, device)
    if plan.update_on == "hybrid":
        # Both end together; of what the host updates, gradients and weights take the link.
        small = 2 * config.elements / config.link
        return host - host * (host - small) / (host + device - small)
    return host


def _name_of(config: RunConfig) -> str:
    plan = Plan.from_json(config.plan)
    where = "" if plan.update_on is None else f", updated on {plan.update_on}"
    if config.clip_period is not None:
        where += f", clipped {100 / config.clip_period if config.clip_period else 0:.0f} %"
    return (
        f"parameters {plan.parameters.name}, states {plan.states.name}, {plan.overlap}{where},"
        f" compute {config.compute / _update_seconds(config):.2g} x the update"
    )


def _figure(config: RunConfig, found: Mapping[str, Any]) -> Figure:
    plan = Plan.from_json(config.plan)
    moved = found["moved"]
    bound = Bound(
        {
            COMPUTE: found["compute"],
            DOWN: moved["down"] / config.link,
            UP: moved["up"] / config.link,
            DRAM: (1 - found["device_share"]) * DRAM_BYTES * config.elements / config.dram,
            DISK: (moved["read"] + moved["written"]) / config.disk,
        }
    )
    seconds = found["seconds"]
    is_mixed = bool(config.clip_period) and len(seconds) > 1
    # The first step of a training that never waits for its updates has none to wait for.
    step = statistics.fmean(seconds[1:]) if is_mixed else statistics.median(seconds)
    detail = {
        "seconds": found["seconds"],
        "bound_by": bound.name,
        "alone_seconds": dict(bound.seconds),
        "device_share": found["device_share"],
        "note": f"{step:.2f} s; "
        + ", ".join(f"{lane} {alone:.2f}" for lane, alone in bound.seconds.items()),
    }
    limit = None if plan.overlap == "none" else at_most(_LIMITS[plan.parameters])
    if config.clip_period is not None:
        limit = at_most(_CLIPPED) if config.clip_period == _ONE_OF else None
    return Figure(f"{_name_of(config)}: step / its bound", limit, step / bound.most, detail=detail)


def _save_trace(name: str, spans: list[dict[str, Any]]) -> None:
    """Write what was when in Chrome's trace format, a track per lane."""
    lanes = list(dict.fromkeys(span["lane"] for span in spans))
    events: list[dict[str, Any]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": i, "args": {"name": lane}}
        for i, lane in enumerate(lanes)
    ]
    for number, span in enumerate(spans):
        event = {"name": span["name"], "cat": span["lane"], "pid": 0}
        event |= {"tid": lanes.index(span["lane"]), "ts": 1e6 * span["start"], "id": number}
        if span["lane"] in {"read", "write"}:  # several at once
            events += [{**event, "ph": "b"}, {**event, "ph": "e", "ts": 1e6 * span["stop"]}]
        else:
            events.append({**event, "ph": "X", "dur": 1e6 * (span["stop"] - span["start"])})
    _TRACES.mkdir(parents=True, exist_ok=True)
    path = _TRACES / f"{name.replace(', ', '-').replace(' ', '_')}.json"
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
