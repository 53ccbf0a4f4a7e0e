"""``with optimizer.recording():`` logs what a run does, for ``optimizer.report()``.

Nothing is patched: torch's hooks of optimizers and modules time forwards and steps, the pipeline
and the links have logs of their own, and a thread samples memory 20 times a second. Logs are
bounded. Outside of a recording none of this runs.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.commits import Commits
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.transfer_log import LoggedTransfer, TransferLog
from tensorstow.report.run_record import STEP, Compared, PredictedStep, RunRecord
from tensorstow.report.samples import MemorySampler, Samples
from tensorstow.report.spans import COMPUTE, Sample, TimeSpan, span_of
from tensorstow.states.memory import StateMemory
from tensorstow.states.traffic import Traffic, TrafficCounters

_MOST_SPANS = 1 << 16
_LOOK_SECONDS = 0.25


class RecordedPart(Protocol):
    """A part of a run with transfers of its own: links, weights on disk. Most have only a log."""

    def start_log(self, log: TransferLog) -> None:
        """Log transfers, and waits for them, to ``log`` from now on."""

    def end_log(self) -> None:
        """Log the rest, and stop logging."""

    def held(self) -> Mapping[str, Callable[[], int]]:
        """Return counters of bytes held over time; they are called in another thread."""
        return {}

    def moved(self) -> Mapping[str, int]:
        """Return the bytes moved so far, by kind; "written" marks kinds that go to disk."""
        return {}

    def disk_bytes(self) -> int:
        """Return the bytes that it has on disk."""
        return 0

    def compared(self, memory: StateMemory) -> list[Compared]:
        """Return a plan's predictions with the measured bytes."""
        del memory
        return []

    def predicted(self) -> PredictedStep | None:
        """Return what a plan predicts of a step; None: nothing."""
        return None


class LinkPart(RecordedPart):
    """The link that gradients and new weights of an optimizer's parameters go over."""

    def __init__(self, link: DeviceLink) -> None:
        self._link = link

    def start_log(self, log: TransferLog) -> None:
        """Log copies to ``log`` from now on."""
        self._link.start_log(log)

    def end_log(self) -> None:
        """Log the rest, and stop logging."""
        self._link.end_log()


class CommitPart(RecordedPart):
    """The commits of a run, for which a step may wait."""

    def __init__(self, commits: Commits) -> None:
        self._commits = commits

    def start_log(self, log: TransferLog) -> None:
        """Log waits to ``log`` from now on."""
        self._commits.log = log

    def end_log(self) -> None:
        """Log no more."""
        self._commits.log = None


class RecordedOptimizer(Protocol):
    """The interface of optimizers that are recorded."""

    def _memory(self) -> StateMemory:
        """Return the bytes of states and buffers."""

    def _traffic(self) -> Traffic:
        """Return the bytes moved."""

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook`` before each step."""

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Call ``hook`` after each step."""


@dataclass(slots=True)
class RecordingResult:
    """What a recording made.

    An optimizer keeps that alone: a ``Recording`` holds the optimizer, and would keep it alive.
    """

    record: RunRecord | None = None
    """None until the block has ended."""


class Recording:
    """One recording; a context manager that ``optimizer.recording()`` returns.

    Args:
        optimizer: The optimizer, whose steps and figures are recorded.
        module: The model whose forward is recorded; None: steps alone.
        log: The pipeline's event log; None: there is none.
        parts: What else moves bytes.
    """

    def __init__(
        self,
        optimizer: RecordedOptimizer,
        *,
        module: nn.Module | None,
        log: TrafficCounters | None,
        parts: list[RecordedPart],
    ) -> None:
        self._optimizer = optimizer
        self._module = module
        self._log = log
        self._parts = parts
        self._hooks: list[Any] = []
        self._spans: list[TimeSpan] = []
        self._transfers = TransferLog()
        self._sampler: MemorySampler | None = None
        self._before: dict[str, int] = {}
        self._open: dict[str, float] = {}
        self._start = 0.0
        self._step = 0
        self._dropped = 0
        self._tiers = {name: Samples() for name in ("states", "disk")}
        self._looked = 0.0
        self.result = RecordingResult()

    def __enter__(self) -> Self:
        """Begin."""
        if self._sampler is not None:
            message = "A recording was entered a second time: ask recording() for a new one."
            raise OptionError(message)
        held: dict[str, Callable[[], int]] = {}
        for part in self._parts:
            held.update(part.held())
        self._sampler = MemorySampler(held)
        self._before = moved_bytes(self._optimizer, self._parts)
        try:
            for part in self._parts:
                part.start_log(self._transfers)
            if self._log is not None:
                self._log.start_trace()
            self._register()
            self._start = time.monotonic()
            self._look(self._start)
            self._sampler.__enter__()
        except BaseException:
            self._unregister()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the recording; the record is kept after an exception, too."""
        sampler = self._sampler
        if sampler is None or self.result.record is not None:
            return
        end = time.monotonic()
        self._look(end)
        try:
            sampler.__exit__(kind, error, traceback)
        finally:
            self._unregister()
        self.result.record = self._make(sampler, end)

    # --- hooks ---

    def _register(self) -> None:
        self._hooks.append(self._optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(self._optimizer.register_step_post_hook(self._after_step))
        if self._module is not None:
            register: Any = self._module.register_forward_pre_hook
            self._hooks.append(register(self._before_forward, prepend=True))
            self._hooks.append(self._module.register_forward_hook(self._after_forward))

    def _unregister(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for part in self._parts:
            part.end_log()
        if self._log is not None:
            self._log.end_trace()

    def _before_forward(self, *_: object) -> None:
        self._end("backward")
        self._begin("forward")

    def _after_forward(self, *_: object) -> None:
        self._end("forward")
        # No hook marks a backward: it is taken to last until the next forward or step.
        if torch.is_grad_enabled():
            self._begin("backward")

    def _before_step(self, *_: object) -> None:
        self._open.pop("forward", None)  # a forward that raised
        self._end("backward")
        self._begin(STEP)

    def _after_step(self, *_: object) -> None:
        self._end(STEP)
        self._step += 1
        now = time.monotonic()
        if now - self._looked >= _LOOK_SECONDS:
            self._look(now)

    def _look(self, now: float) -> None:
        """Sample the optimizer's counters, which takes longer than reading a number."""
        self._looked = now
        memory = self._optimizer._memory()  # noqa: SLF001  # as usage() does
        self._tiers["states"].add(Sample(now, memory.host_bytes))
        on_disk = memory.file_bytes + sum(part.disk_bytes() for part in self._parts)
        self._tiers["disk"].add(Sample(now, on_disk))

    def _begin(self, name: str) -> None:
        self._open[name] = time.monotonic()

    def _end(self, name: str) -> None:
        start = self._open.pop(name, None)
        if start is None:
            return
        if len(self._spans) < _MOST_SPANS:
            self._spans.append(TimeSpan(COMPUTE, name, start, time.monotonic(), self._step))
        else:
            self._dropped += 1

    # --- what it makes ---

    def _make(self, sampler: MemorySampler, end: float) -> RunRecord:
        spans = [*self._spans, *map(_span_of_transfer, self._transfers.transfers)]
        if self._log is not None:
            log = self._log
            spans += [span_of(event, log.lane_of(event)) for event in log.trace()]
        moved = {
            name: n - self._before.get(name, 0)
            for name, n in moved_bytes(self._optimizer, self._parts).items()
        }
        held = {
            name: tuple(Sample(self._since(s.time, end), s.nbytes) for s in samples.kept)
            for name, samples in {**sampler.held, **self._tiers}.items()
        }
        whole = totals(self._optimizer, self._parts)
        return replace(
            whole,
            spans=tuple(self._cut(span, end) for span in spans if span.stop > self._start),
            held=held,
            seconds=end - self._start,
            moved=moved,
            written=written_bytes(moved),
            dropped=self._dropped + self._transfers.dropped,
        )

    def _cut(self, span: TimeSpan, end: float) -> TimeSpan:
        start, stop = self._since(span.start, end), self._since(span.stop, end)
        return replace(span, start=start, stop=stop)

    def _since(self, moment: float, end: float) -> float:
        """Return the seconds since the beginning, within the recording."""
        return min(max(moment, self._start), end) - self._start


def totals(optimizer: RecordedOptimizer, parts: list[RecordedPart]) -> RunRecord:
    """Return a record without spans: memory now, and bytes moved since the beginning."""
    memory = optimizer._memory()  # noqa: SLF001  # as usage() does
    moved = moved_bytes(optimizer, parts)
    return RunRecord(
        title=f"tensorstow: a run of {type(optimizer).__name__}",
        spans=(),
        held={},
        seconds=0.0,
        moved=moved,
        written=written_bytes(moved),
        memory=memory,
        traffic=optimizer._traffic(),  # noqa: SLF001  # as usage() does
        disk_bytes=memory.file_bytes + sum(part.disk_bytes() for part in parts),
        compared=tuple(figure for part in parts for figure in part.compared(memory)),
        predicted=next((step for part in parts if (step := part.predicted())), None),
    )


def moved_bytes(optimizer: RecordedOptimizer, parts: list[RecordedPart]) -> dict[str, int]:
    """Return the bytes moved so far, by kind."""
    traffic = optimizer._traffic()  # noqa: SLF001  # as usage() does
    moved = {
        "states read": traffic.bytes_read,
        "states written": traffic.bytes_written,
        "states not read again": traffic.bytes_spared,
        "from the accelerator": traffic.bytes_down,
        "to the accelerator": traffic.bytes_up,
    }
    for part in parts:
        for name, nbytes in part.moved().items():
            moved[name] = moved.get(name, 0) + nbytes
    return moved


def written_bytes(moved: Mapping[str, int]) -> int:
    """Return how many of the bytes moved were written to a disk."""
    return sum(nbytes for name, nbytes in moved.items() if name.endswith(" written"))


def _span_of_transfer(transfer: LoggedTransfer) -> TimeSpan:
    return TimeSpan(
        transfer.lane, transfer.name, transfer.start, transfer.stop, nbytes=transfer.nbytes
    )
