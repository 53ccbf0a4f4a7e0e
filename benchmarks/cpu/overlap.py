"""The seed example (GPT-2) with updates beside backward and beside the next forward.

All contenders live in one process and take turns of a few steps each, every one waiting for its
last writes before the next begins: their ratios are of one run. A turn's first step is not
counted, for it finds the disk at rest.
"""

import gc
import importlib.util
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.cpu.models import SMALL, gpt2
from benchmarks.measure import (
    Figure,
    Limit,
    Sample,
    Settings,
    at_most,
    exactly,
    not_available,
    ratio,
    use_all_cores,
)
from tensorstow import usage
from tensorstow.optim.adam import AdamW
from tensorstow.states.traffic import TraceEvent

_BATCH = (4, 128)
_STEPS = 3  # of a turn, the first one left out
_SHARE = "448MiB"
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train the example."""

    name: str
    overlap: str | None = None
    """None: everything in RAM."""
    budget: str | None = None
    clipped: bool = False

    def optimizer(self, model: torch.nn.Module, directory: Path) -> AdamW:
        """Return the optimizer of ``model``."""
        if self.overlap is None:
            return AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        return AdamW(
            model.parameters(),
            lr=1e-3,
            weight_decay=0.0,
            states="disk",
            dir=directory,
            durability="none",
            overlap=self.overlap,  # type: ignore[arg-type]  # a benchmark's text
            module=model,
            ram_budget=self.budget,
        )


_RAM = Way("RAM")
_RAM_CLIPPED = Way("RAM, clipped", clipped=True)
_NONE = Way("none", "none")
_DEFAULT = Way("auto, the default", "auto")
_BACKWARD = Way("backward", "backward")
_BACKWARD_SHARE = Way(f"backward, {_SHARE}", "backward", _SHARE)
_FORWARD = Way("forward, clipped", "forward", clipped=True)
_FORWARD_SHARE = Way(f"forward, clipped, {_SHARE}", "forward", _SHARE, clipped=True)
_WAYS = (
    _RAM,
    _RAM_CLIPPED,
    _NONE,
    _DEFAULT,
    _BACKWARD,
    _BACKWARD_SHARE,
    _FORWARD,
    _FORWARD_SHARE,
)
_ASKED: tuple[tuple[Way, Way, Limit | None], ...] = (
    (_BACKWARD, _RAM, at_most(1.12)),
    (_BACKWARD_SHARE, _RAM, at_most(1.04)),
    (_FORWARD, _RAM_CLIPPED, at_most(1.30)),
    (_FORWARD_SHARE, _RAM_CLIPPED, at_most(1.15)),
    (_NONE, _RAM, None),
    (_DEFAULT, _NONE, at_most(1.00)),
)


@dataclass
class Contender:
    """A model in training."""

    way: Way
    model: torch.nn.Module
    optimizer: AdamW
    batches: Iterator[torch.Tensor]
    seconds: list[float] = field(default_factory=list)
    tails: list[float] = field(default_factory=list)
    """Seconds from the end of backward until ``step()`` returned."""
    losses: list[float] = field(default_factory=list)

    def turn(self) -> None:
        """Take ``_STEPS`` steps and count all but the first."""
        for step in range(_STEPS):
            start = time.perf_counter()
            ids = next(self.batches)
            torch.manual_seed(len(self.losses))  # the same dropout for all
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            backward = time.perf_counter()
            if self.way.clipped:
                self.optimizer.clip_grad_norm_(_CLIP)
            self.optimizer.step()
            tail = time.perf_counter() - backward
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if step:
                self.seconds.append(time.perf_counter() - start)
                self.tails.append(tail)
        self.optimizer.synchronize()


def figures(settings: Settings) -> Iterator[Figure]:
    """Train every way in turns and compare."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("overlap", None, "transformers is not installed")
        return
    use_all_cores()
    directory = settings.scratch(8 << 30)
    contenders = [_contender(way, directory, quick=settings.quick) for way in _WAYS]
    for contender in contenders:
        contender.turn()  # first steps only write, and schedules learn their order
        contender.seconds.clear()
        contender.tails.clear()
    turns = max(1, settings.pairs // 2)
    for turn in range(turns):
        for contender in contenders[:: -1 if turn % 2 else 1]:
            contender.turn()
    yield from _times(contenders)
    yield from _tails(contenders)
    yield from _same_losses(contenders)
    for contender in contenders:
        contender.optimizer.close()
    contenders.clear()
    gc.collect()


def _contender(way: Way, directory: Path, *, quick: bool) -> Contender:
    model = gpt2(**SMALL if quick else {})
    words = model.config.vocab_size
    generator = torch.Generator().manual_seed(1)
    batches = (
        torch.randint(words, (2, 16) if quick else _BATCH, generator=generator)
        for _ in itertools.count()
    )
    return Contender(way, model, way.optimizer(model, directory), batches)


def _times(contenders: Sequence[Contender]) -> Iterator[Figure]:
    samples = {c.way.name: Sample(tuple(c.seconds)) for c in contenders}
    for over, under, limit in _ASKED:
        title = f"seed example, step: {over.name} / {under.name}"
        yield ratio(title, limit, samples, over.name, under.name)


def _tails(contenders: Sequence[Contender]) -> Iterator[Figure]:
    for contender in contenders:
        if contender.way.overlap is None:
            continue
        tail = Sample(tuple(contender.tails))
        moving = usage(optimizer=contender.optimizer).states.disk_bytes
        yield Figure(
            f"seed example, {contender.way.name}: from the end of backward until step() returns",
            None,
            tail.median,
            "s",
            {"seconds": tail.summary(), "states_on_disk_bytes": moving, **_last_step(contender)},
        )


def _last_step(contender: Contender) -> dict[str, float]:
    """Return what each lane did in the last step, traced: what lies where nothing hides it."""
    optimizer = contender.optimizer
    optimizer.start_trace()
    contender.turn()
    events = optimizer.trace()
    last = max((e.stop for e in events if e.lane == "update"), default=0.0)
    waits = [e for e in events if e.lane == "wait"]
    blocked = sum(e.stop - e.start for e in waits) / _STEPS

    def busy(lane: str, inside: Callable[[TraceEvent], bool]) -> float:
        return sum(e.stop - e.start for e in events if e.lane == lane and inside(e)) / _STEPS

    in_wait = _inside(waits)
    return {
        "blocked_s": blocked,
        "updating_s": busy("update", lambda _: True),
        "updating_while_blocked_s": busy("update", in_wait),
        "bytes_read": sum(e.nbytes for e in events if e.lane == "read") / _STEPS,
        "bytes_written": sum(e.nbytes for e in events if e.lane == "write") / _STEPS,
        "bytes_read_while_blocked": sum(e.nbytes for e in events if e.lane == "read" and in_wait(e))
        / _STEPS,
        "last_update_to_end_s": max(e.stop for e in events) - last if events else 0.0,
    }


def _inside(waits: Sequence[TraceEvent]) -> Callable[[TraceEvent], bool]:
    return lambda e: any(w.start <= e.stop <= w.stop for w in waits)


def _same_losses(contenders: Sequence[Contender]) -> Iterator[Figure]:
    for clipped in (False, True):
        mine = [c for c in contenders if c.way.clipped is clipped]
        steps = min(len(c.losses) for c in mine)
        curves = {tuple(c.losses[:steps]) for c in mine}
        what = "clipped" if clipped else "not clipped"
        yield Figure(f"seed example, {what}: different loss curves", exactly(1), len(curves), "")
