"""What the trainings of `gpu` say: throughput, what bounds it, bytes, losses."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from benchmarks.accelerator.bounds import COMPUTE, Bound, bound_of
from benchmarks.accelerator.peers import PEERS
from benchmarks.accelerator.ways import COMPUTE as COMPUTE_WAY
from benchmarks.accelerator.ways import OURS, WHOLE, Moved, Way
from benchmarks.measure import (
    Figure,
    Sample,
    at_least,
    at_most,
    exactly,
    fastest,
    not_available,
    ratio,
)

_OF_NO_OFFLOAD = 0.95  # of its throughput, where compute is the slowest
_FORWARD_AND_BACKWARD = 6  # operations per parameter and token, attention left out


class Outcome(Protocol):
    """What was seen of one way; ``gpu.Outcome``."""

    way: Way
    seconds: list[float]
    losses: list[list[float]]
    moved: Moved
    crossed: tuple[int, int] | None
    device_bytes: int
    why: str


def of(
    outcomes: Sequence[Outcome], rates: Mapping[str, float], elements: int, tokens: int
) -> Iterator[Figure]:
    """Judge the outcomes; ``rates`` in bytes a second, ``tokens`` of a step."""
    ran = {o.way.name: o for o in outcomes if not o.why}
    samples = {name: Sample(tuple(o.seconds)) for name, o in ran.items()}
    compute = samples[COMPUTE_WAY.name].median
    for name, rate in rates.items():
        yield Figure(f"{name}, alone", None, rate / 1e9, "GB/s")
    flops = _FORWARD_AND_BACKWARD * elements * tokens / compute / 1e12
    detail = {"parameters": elements, "seconds": compute}
    yield Figure("compute alone: forward and backward", None, flops, "TFLOP/s", detail)
    bounds = {n: bound_of(o.way, o.moved, elements, compute, rates) for n, o in ran.items()}
    yield from (_break_even(bounds[way.name], tokens) for way in _best_first(ran)[:1])
    for outcome in outcomes:
        if outcome.way.name in bounds and outcome.way is not COMPUTE_WAY:
            yield _bound(outcome, bounds[outcome.way.name], samples, elements)
    yield from _bytes(ran, elements)
    yield from _against_whole(outcomes, samples, bounds)
    yield from _against_peers(outcomes, samples)
    yield from _losses(ran)


def _best_first(ran: Mapping[str, Outcome]) -> list[Way]:
    """Return those of ours that the targets are about, as far as they ran, the fastest first."""
    ways = [way for way in OURS if way.on_device and way.name in ran]
    return sorted(ways, key=lambda way: statistics.median(ran[way.name].seconds))


def _break_even(bound: Bound, tokens: int) -> Figure:
    """Return the tokens with which compute takes as long as all that it is to hide."""
    others = max(s for name, s in bound.seconds.items() if name != COMPUTE)
    least = tokens * others / bound.seconds[COMPUTE]
    note = f"measured with {tokens:,} tokens a step"
    return Figure(
        "states HOST, parameters DEVICE: tokens a step at break-even",
        None,
        least,
        "",
        {"note": note},
    )


def _bound(outcome: Outcome, bound: Bound, samples: Mapping[str, Sample], elements: int) -> Figure:
    """Return the time of a step over what it cannot be faster than."""
    name = outcome.way.name
    moved = outcome.moved
    down, up = moved.down / elements, moved.up / elements
    crossed = f"{down:.3g} bytes down and {up:.3g} up per parameter"
    if outcome.crossed is None and not outcome.way.is_ours:
        crossed = "what it moves over the link could not be counted"
    detail = {
        "note": f"bound by: {bound.name}; {crossed}",
        "bound_by": bound.name,
        "alone_seconds": dict(bound.seconds),
        "seconds": samples[name].summary(),
        "bytes_per_parameter": {
            "link down": down,
            "link up": up,
            "disk read": moved.read / elements,
            "disk written": moved.written / elements,
            "host DRAM": outcome.way.dram_bytes,
        },
        "copied_by_torch_per_parameter": [n / elements for n in outcome.crossed or ()],
        "device_bytes": outcome.device_bytes,
    }
    return Figure(f"{name}: step / its bound", None, samples[name].median / bound.most, "x", detail)


def _bytes(ran: Mapping[str, Outcome], elements: int) -> Iterator[Figure]:
    for way in OURS:
        if way.on_device and way.name in ran:
            moved = ran[way.name].moved
            for word, nbytes in (("down", moved.down), ("up", moved.up)):
                name = f"{way.name}: link bytes per bf16 parameter and step, {word}"
                yield Figure(name, exactly(2), nbytes / elements, "bytes")


def _against_whole(
    outcomes: Sequence[Outcome], samples: Mapping[str, Sample], bounds: Mapping[str, Bound]
) -> Iterator[Figure]:
    for outcome in outcomes:
        way = outcome.way
        if way in {COMPUTE_WAY, WHOLE}:
            continue
        title = f"{way.name}: throughput / no offload"
        if WHOLE.name not in samples or way.name not in samples:
            why = outcome.why or "nothing runs without offload here"
            yield not_available(title, at_least(_OF_NO_OFFLOAD) if way.on_device else None, why)
            continue
        passed = bounds[way.name].name == COMPUTE
        limit = at_least(_OF_NO_OFFLOAD) if way.on_device and passed else None
        pair = _even(samples, WHOLE.name, way.name)
        figure = ratio(title, limit, pair, WHOLE.name, way.name)
        if way.on_device and not passed:
            figure.detail["note"] = f"below break-even: {bounds[way.name].name} takes longer"
        yield figure


def _even(samples: Mapping[str, Sample], a: str, b: str) -> dict[str, Sample]:
    """Return two samples of one length: of a round that was cut off one has fewer."""
    length = min(len(samples[name].seconds) for name in (a, b))
    return {name: Sample(samples[name].seconds[:length]) for name in (a, b)}


def _against_peers(outcomes: Sequence[Outcome], samples: Mapping[str, Sample]) -> Iterator[Figure]:
    ours = [way.name for way in OURS if way.on_device and way.name in samples]
    whys = {o.way.name: o.why for o in outcomes}
    for peer in PEERS:
        title = f"the fastest of ours, states HOST, parameters DEVICE: throughput / {peer.name}"
        if peer.name not in samples or not ours:
            why = whys[peer.name] or "none of ours ran"
            yield not_available(title, at_least(1.0), why)
            continue
        best = fastest(samples, ours)
        figure = ratio(title, at_least(1.0), _even(samples, peer.name, best), peer.name, best)
        figure.detail["note"] = best
        yield figure


def _losses(ran: Mapping[str, Outcome]) -> Iterator[Figure]:
    """Compare losses: ours are one curve, and no offload's begins as it does.

    Only begins, for torch has no masters: its bf16 weights lose what changes them little.
    """
    curves = [curve for way in OURS if way.name in ran for curve in ran[way.name].losses]
    length = min(map(len, curves), default=0)  # a slow way's turn has fewer steps
    different = {tuple(curve[:length]) for curve in curves}
    yield Figure("ours: different loss curves", exactly(1), len(different), "")
    if WHOLE.name not in ran or not curves:
        return
    mine, whole = curves[0], ran[WHOLE.name].losses[0]
    apart = [abs(a - b) / b for a, b in zip(mine, whole, strict=False)]
    yield Figure(
        "ours: loss after one update, apart from no offload's",
        at_most(1e-3),
        max(apart[:2]),
        "",
        {"ours": mine, "no offload": whole, "median_apart": statistics.median(apart)},
    )
