"""Compares the first steps of ``plan="auto"`` with the prediction, and follows the free memory.

When one of the first forwards or steps has ended, it reads a clock and counters that exist anyway:
it waits for nothing, and no result changes. It logs one line with the comparison.

[Note: Host room] A plan counts no activations on the CPU: it leaves half of the free memory to
them. The first steps show how much they take. Then buffers of parameters on disk get the memory
that stayed free beyond a fifth, or give back what the fifth lacks. The bytes beyond the plan's hold
whole units, which move from DISK to HOST in the order of the model. Their buffers stay in memory,
and are not read or written any more. States and commits do not change, so no bit changes. All this
applies only if the machine is the budget: a budget of the user's stays as it is. Copies on an
accelerator follow its memory by themselves (``fsdp.device_cache``). Ranks decide alone.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.fsdp.automatic import own_host_bytes
from tensorstow.fsdp.sharding import rank_here
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.fsdp.units import Unit
from tensorstow.io.local_ranks import local_ranks
from tensorstow.memory.buffer_pool import BufferPool, PooledBuffer
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.report.rss import peak_bytes, resident_bytes
from tensorstow.report.run_record import Compared, PredictedStep

logger = logging.getLogger("tensorstow")

_STEPS = 4
"""Steps that are watched. The first two create states and buffers; the others are timed."""
_RESERVE = 0.2
"""Share of the free memory and the process's memory together that stays free."""
_OFF = 0.2
"""Share of a prediction; a larger difference is logged as a warning."""


def buffers_of(units: Iterable[Unit]) -> dict[str, Sequence[PooledBuffer]]:
    """Return the buffers of a placed model's units on disk, by the units' names, in their order.

    Inner units come first.
    """
    by_unit: dict[str, Sequence[PooledBuffer]] = {}
    taken: set[PooledBuffer] = set()  # buffers of inner units
    for unit in units:
        shards = [storage_of(parameter) for parameter in unit.module.parameters()]
        below = dict.fromkeys(b for shard in shards if shard is not None for b in shard.unit)
        if buffers := [buffer for buffer in below if buffer not in taken]:
            by_unit[unit.name] = buffers
            taken.update(buffers)
    return by_unit


class HostRoom:
    """The least host memory that was free, and the units that follow it ([Note: Host room])."""

    def __init__(self, units: Mapping[str, Sequence[PooledBuffer]]) -> None:
        """Measure nothing yet; ``units``: the buffers of each unit on disk, by name."""
        self._units = units
        pools = dict.fromkeys(buffers[0].pool for buffers in units.values())
        self._planned = {p: p.memory.capacity for p in pools if p.memory.capacity < p.total_bytes}
        self._in_memory: dict[str, Sequence[PooledBuffer]] = {}
        """The units that were moved to HOST: each of their buffers has one pin of this object."""
        self._least: tuple[int, int] | None = None

    def measure(self) -> None:
        """Measure the free memory and this process's memory."""
        if self._planned:
            now = (own_host_bytes(local_ranks().count), resident_bytes())
            # The pairs compare by the free bytes, which come first.
            self._least = now if self._least is None else min(self._least, now)

    def follow(self) -> None:
        """Resize the buffers by the least free memory, move units, and log it."""
        if self._least is None:
            return
        change = spare_bytes(*self._least)
        for pool, planned in self._planned.items():
            memory, before = pool.memory, pool.memory.capacity
            pool.resize(before + change // len(self._planned))
            if memory.capacity != before:
                logger.info(
                    "%s of the %s of parameters on disk may stay in memory now, before %s: %s of"
                    " host memory were free at the least",
                    *map(format_bytes, (memory.capacity, pool.total_bytes, before, self._least[0])),
                )
            # If all buffers fit, no unit has to pass through the plan's bytes.
            everything = memory.capacity == pool.total_bytes
            self._move(pool, memory.capacity if everything else memory.capacity - planned)

    def _move(self, pool: BufferPool, room: int) -> None:
        """Let as many units of a pool be on HOST as ``room`` bytes hold."""
        wanted: dict[str, Sequence[PooledBuffer]] = {}
        for name, buffers in self._units.items():
            nbytes = sum(buffer.nbytes for buffer in buffers)
            if buffers[0].pool is pool and nbytes <= room:
                wanted[name] = buffers
                room -= nbytes
        mine = {name for name, buffers in self._in_memory.items() if buffers[0].pool is pool}
        for name in mine - wanted.keys():
            for buffer in self._in_memory.pop(name):
                buffer.unpin()
        pool.resize(pool.memory.capacity)  # evicts the units that were unpinned
        for name, buffers in wanted.items():
            if name not in mine:
                for buffer in buffers:
                    buffer.pin()
                    # One by one: if the next pin fails, this one is known and can be undone.
                    self._in_memory[name] = (*self._in_memory.get(name, ()), buffer)
        _log_moved([name for name in wanted if name not in mine], "DISK to HOST")
        _log_moved([name for name in self._units if name in mine - wanted.keys()], "HOST to DISK")


def _log_moved(names: Sequence[str], tiers: str) -> None:
    if names:
        listed = ", ".join(name or "root" for name in names)
        logger.info("%s moved from %s: %s", format_count(len(names), "unit"), tiers, listed)


def spare_bytes(free: int, resident: int) -> int:
    """Return the free bytes beyond a reserve; below 0: the bytes that the reserve lacks."""
    return free - int(_RESERVE * (free + resident))


def _nothing(_: PlacedOptimizer) -> Sequence[Compared]:
    return ()


class FirstSteps:
    """Measures the bytes and seconds of the first steps of a run."""

    def __init__(
        self,
        compare: Callable[[PlacedOptimizer], Sequence[Compared]],
        step: PredictedStep | None,
        room: HostRoom | None = None,
    ) -> None:
        """Watch nothing yet.

        Args:
            compare: Returns predicted bytes and measured bytes.
            step: The prediction for a step; None: there is none.
            room: Moves units by the free host memory; None: none move.
        """
        self._compare = compare
        self._step = step
        self._room = room
        self._ends: list[float] = []
        self._resident_before = resident_bytes()
        self._handles: list[RemovableHandle] = []

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a hook that measures nothing, for a copied or saved model."""
        return FirstSteps, (_nothing, None)

    def watch(self, model: nn.Module, optimizer: PlacedOptimizer) -> None:
        """Measure after the first forwards of a model and steps of its optimizer."""
        optimizer.register_step_post_hook(self._end)
        if self._room is not None:
            self._handles = [model.register_forward_hook(self._look)]

    def _look(self, *_: object) -> None:
        """Measure when activations are at their peak."""
        if self._room is not None:
            self._room.measure()

    def _end(self, optimizer: Any, args: Any, keywords: Any) -> None:  # noqa: ANN401  # torch's own
        del args, keywords
        if len(self._ends) == _STEPS:
            return
        self._ends.append(time.perf_counter())
        self._look()
        if len(self._ends) < _STEPS:
            return
        for handle in self._handles:
            handle.remove()
        if self._room is not None:
            self._room.follow()
        if rank_here() == 0:
            # The first interval is the second step, which still makes states and buffers.
            took = min(later - earlier for earlier, later in list(pairwise(self._ends))[1:])
            level, line = compared_line(self._compare(optimizer), self._step, took)
            logger.log(level, "%s; %s", line, resident_line(self._resident_before, peak_bytes()))


def resident_line(before: int, peak: int | None) -> str:
    """Return a line on the host memory of the process, activations included.

    ``before``: when the model was placed. ``peak``: until now; None: the kernel does not record it.
    """
    line = f"resident memory, with activations: {format_bytes(before)} when the model was placed"
    if peak is None:
        return f"{line}, its peak is not recorded"
    return f"{line}, {format_bytes(peak)} at most"


def compared_line(
    items: Sequence[Compared], step: PredictedStep | None, seconds: float
) -> tuple[int, str]:
    """Return a log level and a line: bytes of each tier and seconds of a step.

    The level is WARNING if a value differs by more than 20 %, with possible causes in the line.
    Items without a measurement are left out.
    """
    comparisons, causes = [], []
    counted = [item for item in items if item.measured is not None]
    for tier in dict.fromkeys(item.tier for item in counted):
        of_tier = [item for item in counted if item.tier == tier]
        predicted = sum(item.predicted for item in of_tier)
        measured = sum(item.measured or 0 for item in of_tier)
        left_out = ", ".join(e.purpose for e in items if e.tier == tier and e.measured is None)
        comparisons.append(
            f"{tier} {format_bytes(predicted)} predicted, {format_bytes(measured)} measured"
            + (f" (without {left_out})" if left_out else "")
        )
        if abs(measured - predicted) > _OFF * predicted:
            worst = max(of_tier, key=lambda item: abs((item.measured or 0) - item.predicted))
            causes.append(f"{tier} differs most in {worst.purpose}")
    if step is None:
        comparisons.append(
            f"a step {seconds:.3g} s measured, not predicted without rates and tokens="
        )
    else:
        comparisons.append(f"a step {step.seconds:.3g} s predicted, {seconds:.3g} s measured")
        if abs(seconds - step.seconds) > _OFF * step.seconds:
            causes.append(
                f"a step was to be bound by {step.binding}: other work on it, a rate that has"
                " changed (`tensorstow calibrate`), or tokens= of another batch"
            )
    line = "; ".join(comparisons)
    if not causes:
        return logging.INFO, f"first steps as planned: {line}"
    why = "; ".join(causes)
    return logging.WARNING, f"first steps differ from the plan by more than 20 %: {line} ({why})"
