"""The native pipeline over a set of chunks: its life, its failures, its counters."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

import tensorstow._native as _native
from tensorstow.base.errors import ForkError, PoisonedError
from tensorstow.io.files import transfer_error
from tensorstow.optim.chunks import Chunk, Ring
from tensorstow.optim.policy import PipelinePolicy

_LONGEST_TRACE = 1 << 18


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry of the event log: what ``lane`` did between two times of ``time.monotonic()``."""

    lane: str
    """read, update, write, or wait: ``step()`` was blocked."""
    start: float
    stop: float
    chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """What moved since the optimizer was made."""

    bytes_read: int
    bytes_written: int
    chunks_updated: int
    ring_high_water_bytes: int
    wait_seconds: float
    """Time that ``step()`` was blocked."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one step does with one parameter; the default leaves it alone."""

    weight: int = 0
    gradient: int = 0
    """Addresses; no gradient, no update."""
    gradient_dtype: int = 0
    seed_master: bool = False
    scalars: int = 0
    """Row of the step's table of scalars."""


class UpdatePipeline:
    """READ, UPDATE and WRITE of chunks in native threads; made anew when chunks are added."""

    def __init__(self, policy: PipelinePolicy) -> None:
        """Remember how; ``connect`` says what."""
        self._policy = policy
        self._owner = os.getpid()
        self._native: _native.Pipeline | None = None
        self._chunks: Sequence[Chunk] = ()
        self._slot_bytes = 0
        self._poison: BaseException | None = None
        self._closed = False
        self.lock = threading.RLock()
        """Held by whoever uses the ring: a step, or reading and setting states."""
        self._tracing = False
        self._past_trace: list[TraceEvent] = []
        self._past = Traffic(0, 0, 0, 0, 0.0)

    def connect(self, engine: _native.Engine, ring: Ring, chunks: Sequence[Chunk]) -> None:
        """Serve ``chunks`` from now on; those served before keep their states."""
        stored = {c for c in chunks if c.number >= 0 and self.state(c) == "stored"}
        numbers = {}
        plan = ring.plan
        native = _native.Pipeline(
            engine, ring.address, plan.slots, plan.slot_bytes, plan.stream_stride, self._policy.isa
        )
        for chunk in chunks:
            numbers[chunk] = native.add_chunk(
                str(chunk.family.dtype).removeprefix("torch."),
                chunk.family.amsgrad,
                [(r.parameter, r.start, r.position, r.count) for r in chunk.plan.runs],
                chunk.plan.elements,
                (-1 if chunk.file is None else chunk.file.number, chunk.offset, chunk.stream_bytes),
                [view.data_ptr() for view in chunk.resident],
                chunk in stored,
            )
        if self._tracing:
            native.start_trace(_LONGEST_TRACE)
        self._past, self._past_trace = self.traffic(), self.trace()
        for chunk, number in numbers.items():
            chunk.number = number
        self._native, self._chunks, self._slot_bytes = native, chunks, plan.slot_bytes

    def prefetch(self) -> None:
        """Start reading the first chunks of the next step, as many as the ring holds.

        Called from inside backward, so what is wrong is left for ``step`` to say.
        """
        if self._owner != os.getpid() or self._policy.schedule == "naive":
            return
        # Whoever holds the lock is using the ring; reading ahead is no loss to leave out.
        if self.lock.acquire(blocking=False):
            try:
                if self._native is not None and self._poison is None:
                    self._native.prefetch()
            finally:
                self.lock.release()

    def step(self, rows: Sequence[StepRow], scalars: npt.NDArray[np.float32]) -> None:
        """Update the parameters of ``rows`` by ``scalars`` (H, 9); return once weights are new."""
        self._refuse_fork()
        with self.lock:
            failure = self._live().step(
                _column([r.weight for r in rows]),
                _column([r.gradient for r in rows]),
                _column([r.gradient_dtype for r in rows]),
                _column([r.seed_master for r in rows]),
                _column([r.scalars for r in rows]),
                scalars,
            )
            self._check(failure)
            if self._policy.schedule == "naive":
                self.settle()

    def settle(self) -> None:
        """Wait until every write has landed and no buffer is in use."""
        if self._native is not None or self._poison is not None or self._closed:
            self._check(self._live().quiesce())

    def state(self, chunk: Chunk) -> str:
        """Return the chunk's state: resident, blank, stored, ... (csrc/pipeline/pipeline.h)."""
        return self._live().state(chunk.number)

    def mark_stored(self, chunk: Chunk) -> None:
        """Say that a blank chunk has been written by someone else."""
        if self.state(chunk) == "blank":
            self._live().mark_stored(chunk.number)

    def poison(self, error: BaseException) -> None:
        """Refuse everything from now on: ``error`` left the states half written."""
        self._poison = error

    def traffic(self) -> Traffic:
        """Return what moved so far."""
        past = self._past
        if self._native is None:
            return past
        now = self._native.counters()
        high_water = int(now["slots_high_water"]) * self._slot_bytes
        return Traffic(
            bytes_read=past.bytes_read + int(now["bytes_read"]),
            bytes_written=past.bytes_written + int(now["bytes_written"]),
            chunks_updated=past.chunks_updated + int(now["chunks_updated"]),
            ring_high_water_bytes=max(past.ring_high_water_bytes, high_water),
            wait_seconds=past.wait_seconds + now["wait_seconds"],
        )

    def start_trace(self) -> None:
        """Begin an event log (bounded: the first 262,144 events are kept)."""
        self._tracing = True
        self._past_trace = []
        if self._native is not None:
            self._native.start_trace(_LONGEST_TRACE)

    def trace(self) -> list[TraceEvent]:
        """Return the event log so far, empty where none was begun."""
        events = [] if self._native is None else self._native.trace()
        return [*self._past_trace, *(TraceEvent(*event) for event in events)]

    def close(self) -> None:
        """Drain and stop the threads. Idempotent; does nothing in a forked child."""
        if self._owner == os.getpid():
            self._past, self._past_trace = self.traffic(), self.trace()
            self._native, self._chunks = None, ()
            self._closed = True

    def _refuse_fork(self) -> None:
        if self._owner != os.getpid():
            message = (
                "An optimizer was used in a forked process: its threads, buffers and files belong"
                " to the parent. Make the optimizer in the process that steps it."
            )
            raise ForkError(message)

    def _live(self) -> _native.Pipeline:
        self._refuse_fork()
        if self._poison is not None:
            message = (
                f"This optimizer failed before and its states are half updated: {self._poison}"
                " Load a checkpoint into a new optimizer."
            )
            raise PoisonedError(message) from self._poison
        if self._native is None:
            message = "This optimizer was closed: its states are gone. Make a new one."
            raise PoisonedError(message)
        return self._native

    def _check(self, failure: tuple[int, str, int, int, int, int]) -> None:
        code, operation, _, number, offset, length = failure
        if code:
            file = self._chunks[number].file
            path = Path("(no file)") if file is None else file.path
            error = transfer_error(path, operation, code, offset, length)
            self.poison(error)
            raise error


def _column(values: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
