"""Compares the first steps of ``plan="auto"`` with what was predicted, and follows what is free.

It looks when a forward or a step has ended, a few times, at a clock and at counts that are kept
anyway: nothing is waited for, and no result changes. One line says what was found.

[Note: Host room] A plan counts no activations on the CPU: it leaves half of the free memory to
them. The first steps show what they take. Then buffers of parameters on disk get what stayed free
beyond a fifth, or give back what is lacking of it. What they get beyond the plan's holds whole
units: these move from DISK to HOST, the first of the model first. Their buffer stays in memory, and
is neither read nor written any more; what states and commits are is as before, so no bit changes.
Only where the machine is the budget: one that was given is kept to. Copies on an accelerator follow
its memory by themselves (``fsdp.device_cache``). Ranks decide alone.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.fsdp.automatic import free_host_bytes
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.fsdp.units import Unit
from tensorstow.io.buffer_pool import BufferPool, PooledBuffer
from tensorstow.io.local_ranks import local_ranks
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.report.rss import peak_bytes, resident_bytes
from tensorstow.report.run_record import Compared, PredictedStep

logger = logging.getLogger("tensorstow")

_STEPS = 4
"""Steps that are seen. The first two make states and buffers; the others are timed."""
_RESERVE = 0.2
"""Of what is free and what the process has, together: it stays free."""
_OFF = 0.2
"""As a part of what was predicted: what differs by more is warned of."""


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """What is known of a plan that was chosen here."""

    step: PredictedStep | None
    """What was predicted of a step; None: nothing."""
    is_of_machine: bool
    """Whether the machine was the budget."""


def buffers_of(units: Iterable[Unit]) -> dict[str, PooledBuffer]:
    """Return the buffers of a placed model's units on disk, by the units' names, in their order.

    Args:
        units: All of the model, those inside of others first.
    """
    found: dict[str, PooledBuffer] = {}
    for unit in units:
        shards = [storage_of(parameter) for parameter in unit.module.parameters()]
        pagers = [shard.pager for shard in shards if shard is not None and shard.pager is not None]
        own = next((pager for pager in pagers if pager not in found.values()), None)
        if own is not None:
            found[unit.name] = own
    return found


class HostRoom:
    """The least host memory that was free, and the units that follow it ([Note: Host room])."""

    def __init__(self, units: Mapping[str, PooledBuffer]) -> None:
        """Measure nothing yet; ``units`` are those on disk, with their buffers."""
        self._units = units
        pools = dict.fromkeys(buffer.pool for buffer in units.values())
        self._planned = {p: p.capacity for p in pools if p.capacity < p.total_bytes}
        self._in_memory: dict[str, PooledBuffer] = {}
        """The units that were moved to HOST: one pin of each is ours."""
        self._least: tuple[int, int] | None = None

    def measure(self) -> None:
        """Look at what is free now, and what this process has."""
        if self._planned:
            now = (free_host_bytes() // local_ranks().count, resident_bytes())
            self._least = now if self._least is None else min(self._least, now)

    def follow(self) -> None:
        """Resize the buffers by what was free at the least, move units, and log it."""
        if self._least is None:
            return
        change = spare_bytes(*self._least)
        for pool, planned in self._planned.items():
            before = pool.capacity
            pool.resize(before + change // len(self._planned))
            if pool.capacity != before:
                logger.info(
                    "%s of the %s of parameters on disk may stay in memory now, before %s: %s of"
                    " host memory were free at the least",
                    *map(format_bytes, (pool.capacity, pool.total_bytes, before, self._least[0])),
                )
            everything = pool.capacity == pool.total_bytes
            self._move(pool, pool.capacity if everything else pool.capacity - planned)

    def _move(self, pool: BufferPool, room: int) -> None:
        """Let as many units of a pool be on HOST as ``room`` bytes hold."""
        wanted: dict[str, PooledBuffer] = {}
        for name, buffer in self._units.items():
            if buffer.pool is pool and buffer.nbytes <= room:
                wanted[name] = buffer
                room -= buffer.nbytes
        mine = {name for name, buffer in self._in_memory.items() if buffer.pool is pool}
        for name in mine - wanted.keys():
            self._in_memory.pop(name).unpin()
        pool.resize(pool.capacity)  # what was let go of is evicted
        for name, buffer in wanted.items():
            if name not in mine:
                buffer.pin()
                self._in_memory[name] = buffer
        _log_moved([name for name in wanted if name not in mine], "DISK to HOST")
        _log_moved([name for name in self._units if name in mine - wanted.keys()], "HOST to DISK")


def _log_moved(names: Sequence[str], where: str) -> None:
    if names:
        told = ", ".join(name or "root" for name in names)
        logger.info("%s moved from %s: %s", format_count(len(names), "unit"), where, told)


def spare_bytes(free: int, resident: int) -> int:
    """Return what may be used of the free memory beyond a reserve; below 0: what is lacking of it.

    Args:
        free: Bytes that are free.
        resident: Bytes that this process has.
    """
    return free - int(_RESERVE * (free + resident))


class FirstSteps:
    """What the first steps of a run hold and take."""

    def __init__(
        self,
        compare: Callable[[PlacedOptimizer], Sequence[Compared]],
        step: PredictedStep | None,
        room: HostRoom | None = None,
    ) -> None:
        """Watch nothing yet.

        Args:
            compare: Returns the bytes that were predicted, beside those that are there.
            step: What was predicted of a step; None: nothing.
            room: What follows the free host memory; None: nothing does.
        """
        self._compare = compare
        self._step = step
        self._room = room
        self._ends: list[float] = []
        self._resident_before = resident_bytes()
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module, optimizer: PlacedOptimizer) -> None:
        """Look at the ends of the first forwards of a model and steps of its optimizer.

        Args:
            model: The model.
            optimizer: The optimizer.
        """
        optimizer.register_step_post_hook(self._end)
        if self._room is not None:
            self._handles = [model.register_forward_hook(self._look)]

    def _look(self, *_: object) -> None:
        """Look when activations are at their most."""
        if self._room is not None:
            self._room.measure()

    def _end(self, optimizer: Any, args: Any, keywords: Any) -> None:  # noqa: ANN401  # torch's own
        del args, keywords
        if len(self._ends) == _STEPS:
            return
        self._ends.append(time.perf_counter())
        self._look()
        if len(self._ends) == _STEPS:
            for handle in self._handles:
                handle.remove()
            if self._room is not None:
                self._room.follow()
        if len(self._ends) == _STEPS and not (dist.is_initialized() and dist.get_rank()):
            took = min(later - earlier for earlier, later in list(pairwise(self._ends))[1:])
            level, line = compared_line(self._compare(optimizer), self._step, took)
            logger.log(level, "%s; %s", line, resident_line(self._resident_before, peak_bytes()))


def resident_line(before: int, peak: int | None) -> str:
    """Return how much host memory the process has had, activations among it.

    Args:
        before: Its resident memory when the model was placed, in bytes.
        peak: The most it has had until now; None: the kernel does not record it.
    """
    told = "resident memory, with activations"
    if peak is None:
        return f"{told}: {format_bytes(before)} when the model was placed, its peak is not recorded"
    return f"{told}: {format_bytes(before)} when the model was placed, {format_bytes(peak)} at most"


def compared_line(
    items: Sequence[Compared], step: PredictedStep | None, seconds: float
) -> tuple[int, str]:
    """Return a log level and a line: bytes of each tier and seconds of a step.

    Args:
        items: Bytes by purpose; what is not counted apart is left out.
        step: What was predicted of a step; None: nothing.
        seconds: What one took.

    Returns:
        WARNING where something differs by more than 20 %, and the line says why that may be.
    """
    told, causes = [], []
    counted = [each for each in items if each.measured is not None]
    for tier in dict.fromkeys(each.tier for each in counted):
        own = [each for each in counted if each.tier == tier]
        predicted, measured = sum(e.predicted for e in own), sum(e.measured or 0 for e in own)
        left_out = ", ".join(e.what for e in items if e.tier == tier and e.measured is None)
        told.append(
            f"{tier} {format_bytes(predicted)} predicted, {format_bytes(measured)} measured"
            + (f" (without {left_out})" if left_out else "")
        )
        if abs(measured - predicted) > _OFF * predicted:
            worst = max(own, key=lambda each: abs((each.measured or 0) - each.predicted))
            causes.append(f"{tier} differs most in {worst.what}")
    if step is None:
        told.append(f"a step {seconds:.3g} s measured, not predicted without rates and tokens=")
    else:
        told.append(f"a step {step.seconds:.3g} s predicted, {seconds:.3g} s measured")
        if abs(seconds - step.seconds) > _OFF * step.seconds:
            causes.append(
                f"a step was to be bound by {step.binding}: other work there, a rate that has"
                " changed (`tensorstow calibrate`), or tokens= of another batch"
            )
    line = "; ".join(told)
    if not causes:
        return logging.INFO, f"first steps as planned: {line}"
    why = "; ".join(causes)
    return logging.WARNING, f"first steps differ from the plan by more than 20 %: {line} ({why})"
