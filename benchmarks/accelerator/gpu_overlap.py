"""When updates run beside an accelerator, with states in host memory: a step, over no overlap's.

    python benchmarks/run.py gpu_overlap                      # about 60 s on an H200

One process and one model of 1.04 billion parameters in bf16, one way after the other. The loop
reads the loss of every step, as those do that print it.
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.accelerator.place import Place, accelerator_here
from benchmarks.accelerator.transformer import SHAPES, TINY, Decoder, made_by
from benchmarks.accelerator.ways import COMPUTE, WHOLE, Site, Way, let_go, stow_way
from benchmarks.measure import Figure, Settings, not_available
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap

_WARM_UP, _STEPS, _SEQUENCES = 3, 6, 23
_TIERS = (Tier.DEVICE, Tier.HOST)


def figures(settings: Settings) -> Iterator[Figure]:
    """Measure every way: seconds, and those of each over the same without overlap."""
    place = accelerator_here()
    if place is None:
        yield not_available("gpu_overlap", None, "torch.accelerator has no device here")
        return
    first = made_by(place.device, TINY if settings.quick else SHAPES["1B"])
    for way in (COMPUTE, WHOLE):
        yield _figure(way.name, *_measured(way, place, first))
    for tier in _TIERS:
        alone = None
        for overlap in get_args(Overlap):
            way = stow_way(tier, Tier.HOST, overlap)
            seconds, loss = _measured(way, place, first)
            yield _figure(way.name, seconds, loss)
            alone = alone or statistics.median(seconds)
            ratio = statistics.median(seconds) / alone
            yield Figure(f"parameters {tier.name}, {overlap}: step / without overlap", None, ratio)


def _figure(name: str, seconds: list[float], loss: float) -> Figure:
    detail: dict[str, Any] = {"steps": seconds, "loss of the last": loss}
    return Figure(f"{name}: a step", None, statistics.median(seconds), "s", detail)


def _measured(way: Way, place: Place, first: Decoder) -> tuple[list[float], float]:
    """Return the seconds of steps, and the last loss."""
    length, words = first.positions.num_embeddings, first.embedding.num_embeddings
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(words, (_SEQUENCES, length), generator=generator).to(place.device)
    seconds, loss = [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        training = way.make(Site(place, Path(folder), _SEQUENCES), copy.deepcopy(first))
        for _ in range(_WARM_UP + _STEPS):
            began = time.perf_counter()
            loss = float(training.step(ids))
            seconds.append(time.perf_counter() - began)
        training.finish()
        training.close()
    let_go(place)
    return seconds[_WARM_UP:], loss
