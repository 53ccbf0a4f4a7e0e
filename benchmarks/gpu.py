"""One model trained on a device in every way that offloads, beside the way that offloads nothing.

Ways take turns. Each is made anew from the same weights, trained by the same batches, and gone
before the next is made, so that none needs memory beside another. Beside the times stands what
bounds each: compute, the link, host memory and the disk are measured alone in the same turns. The
batch is as large as it must be for compute to take longer than all that ours moves.

    python benchmarks/run.py gpu                           # on an accelerator
    python benchmarks/run.py gpu --cpu-as-device --quick   # whether it runs, not how fast
"""

import copy
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat

import torch
import torch.distributed as dist

from benchmarks import gpu_figures
from benchmarks.crossings import Crossings
from benchmarks.gpu_bounds import DOWN, DRAM, UP, Rates, rates_of
from benchmarks.gpu_peers import PEERS
from benchmarks.gpu_ways import COMPUTE, OURS, WHOLE, Moved, Site, Training, Way, let_go
from benchmarks.measure import Figure, Sample, Settings, interleave, not_available, use_all_cores
from benchmarks.place import Place, accelerator_here, cpu_as_device
from benchmarks.transformer import BILLION, TINY, Decoder, elements_of

_WARM_UP = 2  # the first step fetches weights and makes states
_STEPS = 4  # of a run, which is timed as a whole: what runs behind its last step too
_RUNS = 2  # of a turn
_RATE_BYTES = 512 << 20
_DISK_BYTES = 16  # per parameter: states and parameters of one training
_MARGIN = 1.25
"""Of compute over all that is to be hidden behind it."""
_MOST_SEQUENCES = 64


@dataclass
class Outcome:
    """What was seen of one way."""

    way: Way
    seconds: list[float] = field(default_factory=list)
    """A step's, of each run."""
    losses: list[list[float]] = field(default_factory=list)
    """Of each turn."""
    moved: Moved = field(default_factory=Moved)
    """A step's."""
    crossed: tuple[int, int] | None = None
    """Bytes of a step down and up that torch copied; None: they could not be counted."""
    device_bytes: int = 0
    """The most that the device held at once."""
    why: str = ""
    """Why it does not run here; empty: it does."""


def figures(settings: Settings) -> Iterator[Figure]:
    """Train a model of a billion parameters in every way; compare times, bytes and losses."""
    with ExitStack() as held:
        place = held.enter_context(cpu_as_device()) if settings.cpu_as_device else None
        place = place or accelerator_here()
        if place is None:
            why = "torch.accelerator has no device here"
            yield not_available("a model on an accelerator", None, why)
            return
        use_all_cores()
        held.enter_context(_same_bits())
        held.enter_context(_own_group())
        yield from _figures(settings, place)


def _figures(settings: Settings, place: Place) -> Iterator[Figure]:
    shape = TINY if settings.quick else BILLION
    first = Decoder(shape)
    elements = elements_of(first)
    directory = settings.scratch(_DISK_BYTES * elements)
    nbytes = 4 << 20 if settings.quick else _RATE_BYTES
    with Rates(place, directory, nbytes) as alone:
        contenders = {name: rate.run for name, rate in alone.each.items()}
        rates = rates_of(interleave(contenders, 3), alone.each)
        moving = max(2 * elements / rates[DOWN], 2 * elements / rates[UP])
        hidden = max(moving, OURS[0].dram_bytes * elements / rates[DRAM])
        most = 2 if settings.quick else _MOST_SEQUENCES
        site = site_for(Site(place, directory, 2), first, _MARGIN * hidden, most)
        batches = _batches(site, first)
        outcomes = [Outcome(way) for way in (COMPUTE, WHOLE, *OURS, *PEERS)]
        raw: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(max(1, settings.pairs // 2)):
            for name, sample in interleave(contenders, 1, warm_up=0).items():
                raw[name] += sample.seconds
            for outcome in outcomes[:: -1 if turn % 2 else 1]:
                _take_turn(outcome, site, first, batches)
        rates = rates_of({name: Sample(tuple(s)) for name, s in raw.items()}, alone.each)
    tokens = site.sequences * shape.length
    yield from gpu_figures.of(outcomes, rates, elements, tokens)


def _take_turn(
    outcome: Outcome, site: Site, first: Decoder, batches: Sequence[torch.Tensor]
) -> None:
    """Make a way's training, take its steps, and let go of it; a peer that cannot says why."""
    if outcome.why:
        return
    try:
        site.place.forget_peak()
        training = outcome.way.make(site, copy.deepcopy(first))
        try:
            _train(outcome, training, site.place, batches)
        finally:
            training.close()
            del training
    except Exception as error:  # whatever a peer's import, compiler or allocator raises
        if not outcome.way.may_fail:
            raise
        outcome.why = f"{type(error).__name__}: {error}".splitlines()[0]
        outcome.seconds.clear()
    let_go(site.place)


def _train(
    outcome: Outcome, training: Training, place: Place, batches: Sequence[torch.Tensor]
) -> None:
    ids = iter(batches)
    losses = [training.step(next(ids)) for _ in range(_WARM_UP)]
    training.finish()
    before = _moved(training)
    for _ in range(_RUNS):
        start = time.perf_counter()
        losses += [training.step(next(ids)) for _ in range(_STEPS)]
        training.finish()
        outcome.seconds.append((time.perf_counter() - start) / _STEPS)
    outcome.moved = _moved(training).since(before).each(_RUNS * _STEPS)
    outcome.device_bytes = place.peak()
    if not outcome.losses:
        outcome.crossed = _crossed(training, next(ids), may_fail=outcome.way.may_fail)
    if training.moved is None and outcome.crossed is not None:
        down, up = outcome.crossed
        outcome.moved = replace(outcome.moved, down=down, up=up)
    outcome.losses.append([loss.item() for loss in losses])


def _crossed(training: Training, ids: torch.Tensor, *, may_fail: bool) -> tuple[int, int] | None:
    """Take a last step, which is slow; return the bytes down and up that torch copies in it."""
    try:
        with Crossings() as seen:
            training.step(ids)
            training.finish()
    except Exception:  # not every project's code takes a mode; its times are good all the same
        if not may_fail:
            raise
        return None
    return seen.down, seen.up


def _moved(training: Training) -> Moved:
    return Moved() if training.moved is None else training.moved()


def _batches(site: Site, first: Decoder) -> list[torch.Tensor]:
    """Return ids of every step of a turn, on the device."""
    generator = torch.Generator().manual_seed(1)
    vocabulary, length = first.embedding.num_embeddings, first.positions.num_embeddings
    shape = (site.sequences, length)
    return [
        torch.randint(vocabulary, shape, generator=generator).to(site.place.device)
        for _ in repeat(None, _WARM_UP + _RUNS * _STEPS + 1)
    ]


# --- how many tokens ---


def site_for(site: Site, first: Decoder, seconds: float, most: int) -> Site:
    """Return a site whose batches take ``seconds`` to compute, or as many as there is room for.

    ``most``: sequences, at most.
    """
    while True:
        took = seconds_of(site, first)
        if took is None:
            let_go(site.place)
            return replace(site, sequences=max(1, site.sequences // 2))
        if took >= seconds or site.sequences >= most:
            return site
        wanted = -(-site.sequences * seconds // took)
        site = replace(site, sequences=min(most, max(site.sequences + 1, int(wanted))))


def seconds_of(site: Site, first: Decoder) -> float | None:
    """Return the seconds of a step with nothing offloaded; None where the device has no room."""
    seconds = []
    try:
        training = WHOLE.make(site, copy.deepcopy(first))
        batch = _batches(site, first)[0]
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


@contextmanager
def _own_group() -> Iterator[None]:
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
def _same_bits() -> Iterator[None]:
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
