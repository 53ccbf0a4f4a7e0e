"""One model trained on a device in every way that offloads, beside the way that offloads nothing.

Ways take turns. Each is made anew from the same weights, trained by the same batches, and gone
before the next is made, so that none needs memory beside another. Beside the times stands what
bounds each: compute, the link, host memory and the disk are measured alone in the same turns. The
batch is as large as it must be for compute to take longer than all that ours moves.

    python benchmarks/run.py gpu --size 1B                 # on an accelerator; 3B and 8B too
    python benchmarks/run.py gpu --simulated --quick       # whether it runs, not how fast
    python benchmarks/run.py gpu --cpu-as-device --quick   # the same without a second memory
    python benchmarks/run.py gpu --journal FOLDER          # a second call goes on from the first
"""

import copy
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.accelerator import gpu_figures
from benchmarks.accelerator.bounds import DOWN, DRAM, UP, Rates, rates_of
from benchmarks.accelerator.journal import Journal
from benchmarks.accelerator.peers import PEERS
from benchmarks.accelerator.place import Place, accelerator_here, cpu_as_device
from benchmarks.accelerator.rounds import Outcome, Rounds, batches_of, outcomes_of
from benchmarks.accelerator.transformer import SHAPES, TINY, Decoder, elements_of, made_by
from benchmarks.accelerator.ways import COMPUTE, OURS, WHOLE, Site, Way, let_go
from benchmarks.measure import (
    Figure,
    Sample,
    Settings,
    interleave,
    machine_facts,
    not_available,
    use_all_cores,
)
from tensorstow.base.errors import DirectoryError

CPU = "the CPU in its place"
"""The accelerator's name where there is none and the CPU is to be it."""
_RATE_BYTES = 512 << 20
_MARGIN = 1.25
"""Of compute over all that is to be hidden behind it."""
_MOST_SEQUENCES = 64
_ALONE = 3
"""How often each thing is measured alone before the batch is chosen by it."""


def figures(settings: Settings) -> Iterator[Figure]:
    """Train a model in every way, unless there is but to judge; compare times, bytes, losses."""
    journal = Journal(_path_of(settings), None if settings.judge_only else _machine_here(settings))
    if not settings.judge_only:
        with ExitStack() as held:
            place = held.enter_context(cpu_as_device()) if settings.cpu_as_device else None
            place = place or accelerator_here()
            if place is None:
                why = "torch.accelerator has no device here"
                if settings.journal is not None:  # the caller would take it for measured
                    raise RuntimeError(why)
                yield not_available("a model on an accelerator", None, why)
                return
            if not settings.quick:  # what is tiny has no work for several threads
                use_all_cores()
            held.enter_context(same_bits())
            held.enter_context(own_group())
            _measure(settings, place, journal)
    yield from _judged(settings, journal)
    failed = [o for o in _outcomes(settings, journal) if o.has_failed and not o.way.may_fail]
    if failed and not settings.judge_only:
        message = "; ".join(f"{outcome.way.name}: {outcome.why}" for outcome in failed)
        raise RuntimeError(message)


def machine_of(settings: Settings) -> dict[str, Any] | None:
    """Return the facts of the machine whose figures ``figures`` gives; None: of this one."""
    here = None if settings.judge_only else _machine_here(settings)
    return Journal(_path_of(settings), here).machine or None


def _path_of(settings: Settings) -> Path | None:
    return settings.journal and settings.journal / f"gpu-{_size(settings)}.jsonl"


def _machine_here(settings: Settings) -> dict[str, Any]:
    facts = machine_facts(settings.directory)
    return {**facts, "accelerator": CPU} if settings.cpu_as_device else facts


def _outcomes(settings: Settings, journal: Journal) -> list[Outcome]:
    return outcomes_of(ways_of(_size(settings)), journal)


def ways_of(size: str) -> tuple[Way, ...]:
    """Return what is measured, the most needed first; the disk with the smallest model alone."""
    ways = sorted((COMPUTE, WHOLE, *OURS, *PEERS), key=_need)
    return tuple(way for way in ways if size in {"1B", "tiny"} or not way.disk_bytes)


def _need(way: Way) -> int:
    if way in PEERS:
        return 2
    return {COMPUTE: 0, WHOLE: 0, OURS[0]: 1}.get(way, 3 if way.on_device else 4)


def _size(settings: Settings) -> str:
    return "tiny" if settings.quick else settings.size


def _measure(settings: Settings, place: Place, journal: Journal) -> None:
    size = _size(settings)
    ways = ways_of(size)
    shape = TINY if settings.quick else SHAPES[size]
    first = made_by(place.device, shape)
    elements = elements_of(first)
    nbytes = 4 << 20 if settings.quick else _RATE_BYTES
    directory = _scratch(settings, max(way.disk_bytes for way in ways) * elements, nbytes)
    with Rates(place, directory, nbytes) as alone:
        contenders = {name: rate.run for name, rate in alone.each.items()}

        def measure_alone(times: int) -> Mapping[str, Sample]:
            samples = interleave(contenders, times, warm_up=times // _ALONE)
            seconds = {name: sample.seconds for name, sample in samples.items()}
            sizes = {name: rate.nbytes for name, rate in alone.each.items()}
            journal.add("alone", seconds=seconds, nbytes=sizes)
            return samples

        rates = rates_of(measure_alone(_ALONE), alone.each)
        site = Site(place, directory, 2)
        sequences = _agreed(journal)
        if sequences is None:
            moving = max(2 * elements / rates[DOWN], 2 * elements / rates[UP])
            hidden = max(moving, OURS[0].dram_bytes * elements / rates[DRAM])
            most = 2 if settings.quick else _MOST_SEQUENCES
            site = site_for(site, first, _MARGIN * hidden, most)
            sequences = site.sequences
            journal.add(
                "site",
                elements=elements,
                sequences=sequences,
                tokens=sequences * shape.length,
            )
        site = replace(site, sequences=sequences)
        rounds = Rounds(ways, site, first, journal, settings.way_seconds)
        rounds.take(max(1, settings.pairs // 2), lambda: measure_alone(1))


def _scratch(settings: Settings, nbytes: int, least: int) -> Path:
    try:
        return settings.scratch(nbytes)
    except DirectoryError:  # no directory has room for states: those ways say so
        return settings.scratch(least)


def _agreed(journal: Journal) -> int | None:
    """Return how many sequences earlier processes took."""
    return next((int(entry["sequences"]) for entry in journal.of("site")), None)


def _judged(settings: Settings, journal: Journal) -> Iterator[Figure]:
    outcomes = _outcomes(settings, journal)
    if not any(o.way is COMPUTE and o.seconds for o in outcomes):
        yield not_available("a model on an accelerator", None, "nothing was measured yet")
        return
    site = journal.of("site")[0]
    rates: dict[str, float] = {}
    alone = journal.of("alone")
    for name, nbytes in alone[0]["nbytes"].items():
        seconds = [s for entry in alone for s in entry["seconds"][name]]
        rates[name] = nbytes / Sample(tuple(seconds)).median
    yield from gpu_figures.of(outcomes, rates, site["elements"], site["tokens"])


# --- how many tokens ---


def site_for(site: Site, first: Decoder, seconds: float, most: int) -> Site:
    """Return a site whose batches take ``seconds`` to compute, or as many as there is room for.

    ``most``: sequences, at most. Where no offload has no room at all, offloads may have.
    """
    for way in (WHOLE, COMPUTE):
        found = _site_with(way, site, first, seconds, most)
        if found is not None:
            return found
    return replace(site, sequences=1)


def _site_with(way: Way, site: Site, first: Decoder, seconds: float, most: int) -> Site | None:
    least = site.sequences
    while True:
        took = seconds_of(site, first, way)
        if took is None:
            let_go(site.place)
            fewer = site.sequences // 2
            return replace(site, sequences=fewer) if site.sequences > least else None
        if took >= seconds or site.sequences >= most:
            return site
        wanted = -(-site.sequences * seconds // took)
        site = replace(site, sequences=min(most, max(site.sequences + 1, int(wanted))))


def seconds_of(site: Site, first: Decoder, way: Way) -> float | None:
    """Return the seconds of a way's step; None where the device has no room."""
    seconds = []
    try:
        training = way.make(site, copy.deepcopy(first))
        batch = batches_of(site, first)[0]
        for _ in range(3):
            start = time.perf_counter()
            training.step(batch)
            training.finish()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return None
    del training
    let_go(site.place)
    return min(seconds)


# --- what holds for all trainings ---


@contextmanager
def own_group() -> Iterator[None]:
    """Let the first who needs ranks start a group for the device: one of the CPU may be there."""
    _leave()
    try:
        yield
    finally:
        _leave()


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def same_bits() -> Iterator[None]:
    """Let the device compute the same bits each time: attention's backward else adds in any order.

    Not to warn only, with which attention stays as it is.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)  # noqa: FBT003  # torch's
    torch.utils.deterministic.fill_uninitialized_memory = False  # a pass over all that is made
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
