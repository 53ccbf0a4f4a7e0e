"""The seed example (GPT-2) through `stow`, one rank on the CPU: what the engine costs.

Contenders take turns of a few steps in one process; a turn's first step is not counted.
"""

import gc
import importlib.util
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.accelerator import link_bytes
from benchmarks.accelerator.place import on_cpu
from benchmarks.cpu.models import SMALL, gpt2
from benchmarks.cpu.raw import RawFile, alternate, cut
from benchmarks.measure import (
    Figure,
    Sample,
    Settings,
    at_most,
    interleave,
    not_available,
    ratio,
    use_all_cores,
)
from tensorstow import usage
from tensorstow.base.plan import Plan
from tensorstow.fsdp.report import ParameterBytes, parameter_bytes
from tensorstow.fsdp.sharding import make_mesh
from tensorstow.fsdp.stow import stow
from tensorstow.fsdp.units import units_of
from tensorstow.io.engine import open_engine
from tensorstow.io.files import scratch_file
from tensorstow.optim.adam import AdamW

_BATCH = (4, 128)
_STEPS = 2  # of a turn, the first one left out
_BLOCKS_HELD = 3
_PIECE = 4 << 20


@dataclass
class Contender:
    """A model in training."""

    name: str
    model: nn.Module
    optimizer: AdamW
    ids: torch.Tensor
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def turn(self) -> None:
        """Take ``_STEPS`` steps and count all but the first."""
        for step in range(_STEPS):
            start = time.perf_counter()
            torch.manual_seed(len(self.losses))  # the same dropout for all
            loss = self.model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(loss.item())
            if step:
                self.seconds.append(time.perf_counter() - start)
        self.optimizer.synchronize()


def figures(settings: Settings) -> Iterator[Figure]:
    """Train every way in turns and compare; then the bytes that they hold and move."""
    if importlib.util.find_spec("transformers") is None:
        yield not_available("engine", None, "transformers is not installed")
        return
    with on_cpu():
        yield from _figures(settings)


def _figures(settings: Settings) -> Iterator[Figure]:
    use_all_cores()
    directory = settings.scratch(8 << 30)
    make = partial(AdamW, lr=1e-3, weight_decay=0.0)
    contenders = list(_contenders(make, directory, quick=settings.quick))
    for contender in contenders:
        contender.turn()
        contender.seconds.clear()
    before = _moved(contenders[-1])
    for turn in range(settings.pairs):
        for contender in contenders[:: -1 if turn % 2 else 1]:
            contender.turn()
    steps = len(contenders[-1].losses) - _STEPS
    moved = tuple((b - a) / steps for a, b in zip(before, _moved(contenders[-1]), strict=True))
    samples = {c.name: Sample(tuple(c.seconds)) for c in contenders}
    raw = _raw(moved, directory, settings)
    yield from _times(samples, raw)
    yield from _bytes(contenders[-1], moved, _held(contenders[0].model))
    yield _same_losses(contenders)
    for contender in contenders:
        contender.optimizer.close()
    contenders.clear()
    gc.collect()
    yield _host_bytes(make, directory, quick=settings.quick)
    yield from link_bytes.figures()


def _contenders(make: Any, directory: Path, *, quick: bool) -> Iterator[Contender]:  # noqa: ANN401
    ids = torch.randint(512, (2, 16) if quick else _BATCH, generator=torch.Generator())
    scratch = {"dir": directory, "durability": "none"}

    def model() -> nn.Module:
        made: nn.Module = gpt2(**_QUICK if quick else {})
        return made

    ram = model()
    yield Contender("RAM", ram, make(ram.parameters()), ids)
    alone = model()
    own = make(alone.parameters(), states="disk", overlap="backward", module=alone, **scratch)
    yield Contender("optimizer alone", alone, own, ids)
    on_host = Plan(states="disk", overlap="backward")
    yield Contender("stowed, HOST", *stow(model(), partial(make, **scratch), plan=on_host), ids)
    mesh = make_mesh(torch.device("cpu"), stage=3, replicas=1)
    sharded = stow(model(), make, plan=Plan(), mesh=mesh)
    yield Contender("RAM, sharded", *sharded, ids)
    plan = Plan(
        parameters="disk", states="disk", overlap="backward", weight_ram_budget=_held(model())
    )
    placed = stow(model(), partial(make, **scratch), plan=plan)
    yield Contender("stowed, DISK", *placed, ids)


_QUICK = {**SMALL, "n_layer": 4}
_LARGE = {"n_layer": 36, "n_embd": 1280, "n_head": 20}


def _held(model: nn.Module) -> int:
    """Return the bytes of the embedding and three blocks, aligned as buffers are."""
    *blocks, root = [unit.nbytes + (1 << 14) for unit in units_of(model)]
    return root + _BLOCKS_HELD * max(blocks)


def _moved(contender: Contender) -> tuple[float, float]:
    """Return the bytes read and written so far, of parameters and states."""
    states = usage(optimizer=contender.optimizer).traffic
    weights: ParameterBytes = parameter_bytes(contender.model)
    return (
        states.bytes_read + weights.bytes_read,
        states.bytes_written + weights.bytes_written,
    )


def _raw(moved: tuple[float, ...], directory: Path, settings: Settings) -> Sample:
    """Return the seconds of raw I/O of as many bytes, half read and half written."""
    half = int(sum(moved) / 2) // _PIECE * _PIECE or _PIECE
    engine = open_engine(depth=32)
    with scratch_file(engine, directory, half) as file:
        raw = RawFile(engine, file.fd, 64 << 20)
        writes = cut("write", 0, half, _PIECE)
        raw.run(writes)
        both = alternate(cut("read", 0, half, _PIECE), writes)
        return interleave({"raw": lambda: raw.run(both)}, settings.pairs)["raw"]


def _times(samples: dict[str, Sample], raw: Sample) -> Iterator[Figure]:
    yield ratio(
        "seed example, states on DISK, parameters on HOST: stow / the optimizer alone",
        at_most(1.05),
        samples,
        "stowed, HOST",
        "optimizer alone",
    )
    compute = samples["RAM"].median
    bound = max(compute, raw.median)
    yield Figure(
        "seed example, parameters on DISK too: step / max(compute, raw I/O of its bytes)",
        at_most(1.15),
        samples["stowed, DISK"].median / bound,
        detail={
            "bound": "compute" if bound == compute else "raw I/O",
            "raw_seconds": raw.summary(),
            "seconds": {name: sample.summary() for name, sample in samples.items()},
        },
    )
    for over, under in (("RAM, sharded", "RAM"), ("stowed, DISK", "RAM, sharded")):
        yield ratio(f"seed example, step: {over} / {under}", None, samples, over, under)


def _bytes(contender: Contender, moved: tuple[float, ...], held: int) -> Iterator[Figure]:
    found = parameter_bytes(contender.model)
    elements = sum(p.numel() for p in contender.model.parameters())
    for word, value in zip(("read", "written"), moved, strict=True):
        name = f"seed example, parameters and states on DISK: bytes {word} per parameter and step"
        yield Figure(name, None, value / elements, "bytes")
    yield Figure(
        "seed example, parameters on DISK: host memory lent to them / embedding and 3 blocks",
        at_most(1.0),
        found.most_buffer_pool_bytes / held,
    )


def _same_losses(contenders: Sequence[Contender]) -> Figure:
    first = contenders[0].losses
    same = [c.losses == first for c in contenders]
    return Figure(
        "seed example: ways whose losses differ from RAM's", at_most(0), same.count(False), ""
    )


def _host_bytes(make: Any, directory: Path, *, quick: bool) -> Figure:  # noqa: ANN401
    """Count what one rank holds on HOST of a bf16 model beside backward.

    Of GPT-2 large: the small one's embedding is a third of it, and so is one unit's gradient.
    """
    model = gpt2(**_QUICK if quick else _LARGE).to(torch.bfloat16)
    elements = sum(p.numel() for p in model.parameters())
    mesh = init_device_mesh("cpu", (1,))
    plan = Plan(states="disk", overlap="backward")
    make = partial(make, dir=directory, durability="none")
    model, optimizer = stow(model, make, plan=plan, mesh=mesh)
    ids = torch.randint(512, (2, 16), generator=torch.Generator())
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    memory = usage(optimizer=optimizer).states
    weights = parameter_bytes(model).host_bytes
    optimizer.close()
    return Figure(
        "bf16 GPT-2 large, parameters on HOST, states on DISK: host bytes per parameter",
        at_most(2.3),
        (weights + memory.gradient_bytes + memory.ram_bytes) / elements,
        "bytes",
        {"weights": weights, "gradients": memory.gradient_bytes, "ring": memory.ring_bytes},
    )
