"""The native pipeline over a set of chunks: begins steps, counts, reports failures."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

import tensorstow._native as _native
from tensorstow.base.errors import DamageError, ForkError, PoisonedError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.base.update_on import Overlap
from tensorstow.io import device_link
from tensorstow.io.files import transfer_error
from tensorstow.states.chunks import Chunk, ChunkRing
from tensorstow.states.kernels import team_of
from tensorstow.states.layout import STATE_DTYPES
from tensorstow.states.policy import PipelinePolicy

_LONGEST_TRACE = 1 << 18
_DAMAGED = -2  # csrc/pipeline/pipeline.h
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernels' numbers for dtypes: csrc/kernels/kernels.h."""
PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Kinds of tensors whose bytes are what the kernels see."""
Failure = tuple[int, str, int, int, int, int]
FilePosition = tuple[int, int]
"""Engine's number of a file, and the byte in it; NOWHERE before the first write."""
NOWHERE: FilePosition = (-1, 0)


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry of the event log: what ``lane`` did between two times of ``time.monotonic()``."""

    lane: str
    """read, update, write, or wait: the caller was blocked."""
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
    """Time that the caller was blocked."""
    bytes_spared: int = 0
    """Not read, because a buffer still held them."""
    bytes_down: int = 0
    """From an accelerator: gradients, and weights that others wrote; or states updated there."""
    bytes_up: int = 0
    """To an accelerator: new weights; or states that are to be updated there."""
    device_share: float = 0.0
    """Of the states: what the next step updates on the accelerator (``update_on``)."""


@dataclass(frozen=True, slots=True)
class StepRow:
    """What one step does with one parameter; the default leaves it alone."""

    weight: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    """Contiguous; no gradient, no update."""
    seed_master: bool = False
    scalars: int = 0
    """Row of the step's table of scalars."""
    key: int = 0
    """Of the random bits that inexact formats round with."""
    expected: bool = False
    """In an open step: its gradient may follow."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """How a step runs; csrc/pipeline/pipeline.h, StepSpec."""

    open: bool = False
    """Gradients follow one by one."""
    capture: bool = False
    """What is written also holds the new weights: a commit."""
    background: bool = False
    """The call returns at once, and the caller computes on the same cores beside it."""
    home_first: bool = False
    """Resident chunks before the others: those that the next forward needs first."""
    outside: bool = False
    """The call returns at once; the caller updates the chunks of ``set_outside``, one by one
    (``next_outside``)."""

    @property
    def goes_on(self) -> bool:
        """Return whether the step is still under way when the call returns."""
        return self.open or self.background or self.outside


_WHOLE = StepKind()


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """What the disk already has of a chunk."""

    place: FilePosition = NOWHERE
    blank: bool = True
    checksums: bytes = b""
    """Of its states, a u32 for each block."""
    weight_checksums: bytes = b""
    """Of the weights behind them; empty where those are not the weights of now."""


def can_update(parameter: torch.Tensor, gradient: torch.Tensor | None) -> bool:
    """Return whether the kernels can update ``parameter`` by ``gradient``."""
    return (
        gradient is not None
        and (gradient.device == parameter.device or gradient.is_cpu)
        and (parameter.is_cpu or device_link.is_remote(parameter))
        and parameter.is_contiguous()
        and gradient.layout == torch.strided
        and gradient.dtype in STATE_DTYPES
        and parameter.dtype in STATE_DTYPES
        and gradient.numel() == parameter.numel()
        and type(parameter) in PLAIN_TENSORS
    )


class Resources:
    """What a pipeline must let go of in order, apart from it and from what failed in it.

    Somebody holds this until then. He does not hold the pipeline: an error leads to the frames that
    raised it, and so to the optimizer and the model.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.native: _native.Pipeline | None = None
        self.memory: list[object] = []
        """Not of the ring, that steps read and write: it must outlive the native pipeline."""

    def close(self) -> None:
        """Drain and stop the threads. Idempotent."""
        self.native = None


class UpdatePipeline:
    """READ, UPDATE and WRITE of chunks in native threads."""

    def __init__(self, policy: PipelinePolicy, overlap: Overlap = "none") -> None:
        """Remember how; ``connect`` says what."""
        # There and back, so that a step begins with what the last one left in the ring; where
        # backward or forward gives the order, that cannot be.
        self._alternate = overlap == "none" and policy.schedule == "pipelined"
        self._policy = policy
        self._owner = os.getpid()
        self.resources = Resources()
        self._chunks: list[Chunk] = []
        self._targets: dict[int, FilePosition] = {}
        self._ring: ChunkRing | None = None
        self._path_of: Callable[[int], Path] = lambda _: Path("(no file)")
        self._poison: BaseException | None = None
        self._untold: BaseException | None = None
        """A failure that a thread behind the caller has met, and nobody who calls has seen."""
        self._closed = False
        self.steps_begun = 0
        """Steps that the native side was given, or may have been."""
        self.lent = self.resources.memory
        self.lock = threading.RLock()
        """Held by whoever uses the ring: a step, or reading and setting states."""
        self._last_traffic = Traffic(0, 0, 0, 0, 0.0)
        self._last_trace: list[TraceEvent] = []
        self._tracing = False

    def connect(
        self,
        engine: _native.Engine,
        ring: ChunkRing,
        chunks: Sequence[Chunk],
        stored: Sequence[StoredChunk],
        path_of: Callable[[int], Path],
    ) -> None:
        """Serve ``chunks`` too from now on, all of them through ``ring``."""
        if self.resources.native is None:
            isa = self._policy.isa
            self.resources.native = _native.Pipeline(
                engine, isa, self._alternate, team_of(self._policy)
            )
            if self._tracing:
                self.resources.native.start_trace(_LONGEST_TRACE)
        self.settle()
        if ring is not self._ring:
            plan = ring.plan
            self.resources.native.set_ring(ring.address, plan.slots, plan.slot_bytes, ring.memory)
        self._ring, self._path_of = ring, path_of
        for chunk, there in zip(chunks, stored, strict=True):
            chunk.number = self.resources.native.add_chunk(
                chunk.family.native,
                [(r.parameter, r.start, r.position, r.count) for r in chunk.plan.runs],
                chunk.plan.elements,
                there.place,
                [(view.data_ptr(), view.untyped_storage()) for view in chunk.resident],
                there.blank,
                (there.checksums, there.weight_checksums),
            )
            self._chunks.append(chunk)

    def prefetch(self) -> None:
        """Start reading the first chunks of the next step, as many as the ring holds.

        Called from inside backward, so what is wrong is left for ``step`` to say.
        """
        if self._owner != os.getpid() or self._policy.schedule == "naive":
            return
        # A hook of this kind is no call, so a handler may commit in it: the thread that commits
        # would wait for the lock, and the handler for that thread.
        with SignalsDeferred():
            # Whoever holds the lock is using the ring; reading ahead is no loss to leave out.
            if self.lock.acquire(blocking=False):
                try:
                    native = self.resources.native  # close() takes no lock
                    if native is not None and self._poison is None:
                        native.prefetch()
                finally:
                    self.lock.release()

    def step(
        self,
        rows: Sequence[StepRow],
        scalars: npt.NDArray[np.float32],
        kind: StepKind = _WHOLE,
    ) -> None:
        """Hand over one step; return once it is published, unless it goes on beside the caller.

        The native side holds the memory of weights and gradients until it is done with it, though
        nobody else may.
        """
        with self.lock:
            table = np.array(
                [
                    (
                        _address(r.weight),
                        _address(r.gradient),
                        0 if r.gradient is None else DTYPE_CODES[r.gradient.dtype],
                        r.seed_master,
                        r.scalars,
                        r.key,
                        r.expected,
                    )
                    for r in rows
                ],
                dtype=np.int64,
            ).reshape(-1, 7)
            native = self._live()
            self._check(native.failure())
            self.steps_begun += 1  # before: an exception must not find a step that nobody knows of
            failure = native.begin(
                table,
                scalars,
                [_owner(r.weight) for r in rows],
                [_owner(r.gradient) for r in rows],
                open=kind.open,
                capture=kind.capture,
                background=kind.background,
                home_first=kind.home_first,
                outside=kind.outside,
            )
            # What fails in a step that goes on is for whoever waits for it to say: at once or
            # later, as the disk has it, would be two behaviours.
            if not kind.goes_on:
                self._check(failure)
            if self._policy.schedule == "naive" and not kind.goes_on:
                self.settle()

    def land(self, parameter: int, gradient: torch.Tensor) -> None:
        """Give an open step a contiguous gradient, whose memory it holds as ``step`` does."""
        dtype = DTYPE_CODES[gradient.dtype]
        self._live().land(parameter, gradient.data_ptr(), dtype, gradient.untyped_storage())

    def land_pieces(self, chunk: int, pieces: Sequence[tuple[int, torch.Tensor | None]]) -> None:
        """Give an open step gradients of a chunk's pieces, each once; None: none comes."""
        given = [
            (n, _address(g), 0 if g is None else DTYPE_CODES[g.dtype], _owner(g)) for n, g in pieces
        ]
        self._live().land_pieces(chunk, given)

    def close_step(self) -> None:
        """Say that no more gradients come."""
        self._live().close()

    def set_outside(self, chunks: Iterable[int]) -> None:
        """Leave these chunks to the caller in outside steps, between steps; all until then."""
        self._live().set_outside(list(chunks))

    def next_outside(self, *, wait: bool) -> tuple[int, int] | None:
        """Return the next (chunk, slot) of an outside step whose states are there to be changed.

        Slot -1: memory of its own. None where the step is over or has failed, which
        ``end_outside`` tells, or where none is there and the caller does not ``wait``; he who
        waits must hold no chunk himself.
        """
        chunk, slot = self._live().next_outside(wait=wait)
        return None if chunk < 0 else (chunk, slot)

    def outside_done(self, chunk: int) -> None:
        """Give a chunk back, whose memory holds the new states."""
        self._live().outside_done(chunk)

    def end_outside(self) -> None:
        """Return when an outside step is over; raise what failed."""
        self.wait_published()
        if self._policy.schedule == "naive":
            self.settle()

    def wait_published(self) -> None:
        """Block until every parameter of the step has its new weight."""
        self._check(self._live().wait_published())

    def wait_parameters(self, parameters: Sequence[int]) -> None:
        """Block until these parameters have their new weights."""
        self._check(self._live().wait_parameters(parameters))

    def wait_chunk(self, chunk: int) -> None:
        """Block until the step is done with a chunk: its weights are new, its gradients used.

        In an outside step, at most until there is a chunk for ``next_outside``.
        """
        self._check(self._live().wait_chunk(chunk))

    def is_updated(self, chunk: int) -> bool:
        """Return whether the step is done with a chunk."""
        return self._live().is_updated(chunk)

    def is_published(self, parameter: int) -> bool:
        """Return whether the parameter has its new weight, and its gradient is not needed."""
        return self._live().is_published(parameter)

    def wait_written(self) -> None:
        """Block until every write of the step has landed; what is read ahead may stay.

        For a thread behind the caller: what fails is raised here, and once more to the caller, as
        itself, where the pipeline is used next.
        """
        failure = self._live().wait_written()
        if failure[0]:
            error = self._error_of(failure)
            if self._poison is None:
                self._untold = error
            self.poison(error)
            raise error

    def settle(self) -> None:
        """Wait until every write has landed and no buffer is in use."""
        if self.resources.native is not None or self._poison is not None or self._closed:
            self._check(self._live().quiesce())

    def order(self, chunks: Iterable[int]) -> None:
        """Take chunks in this order from the next step on."""
        self._live().set_order(list(chunks))

    def order_now(self) -> Sequence[int]:
        """Return the chunks in the order of the step under way, or of the next one."""
        return self._live().order()

    def state(self, chunk: Chunk) -> str:
        """Return the chunk's state: resident, blank, stored, ... (csrc/pipeline/chunk.h)."""
        return self._live().state(chunk.number)

    def place(self, chunk: Chunk) -> FilePosition:
        """Return where the chunk's states were last written."""
        file, offset = self._live().place(chunk.number)
        return file, offset

    def target(self, chunk: Chunk, place: FilePosition) -> None:
        """Write the chunk there from its next write on."""
        self._targets[chunk.number] = place
        self._live().set_target(chunk.number, *place)

    def target_of(self, chunk: Chunk) -> FilePosition:
        """Return where the chunk is written next."""
        return self._targets[chunk.number]

    def captured(self, chunk: Chunk) -> bool:
        """Return whether the chunk's place holds its states and the weights of now."""
        return self._live().captured(chunk.number)

    def forget_capture(self, parameter: int) -> None:
        """Say that someone else wrote the weight since a commit did."""
        self._live().forget_capture(parameter)

    def checksums(self, chunk: Chunk) -> tuple[bytes, bytes]:
        """Return the block checksums of its states and of its weights as they were written."""
        states, weights = self._live().checksums(chunk.number)
        return states, weights

    def rewritten(self, chunk: Chunk, streams: Sequence[torch.Tensor]) -> None:
        """Say that ``streams`` were put into the chunk's memory, or written to its target."""
        self._live().rewritten(chunk.number, [s.data_ptr() for s in streams])

    def check_intact(self, chunk: Chunk, streams: Sequence[torch.Tensor]) -> None:
        """Raise DamageError unless ``streams`` are what was written last."""
        if not self._live().intact(chunk.number, [s.data_ptr() for s in streams]):
            file, offset = self.place(chunk)
            raise _damage(self._path_of(file), offset, chunk.file_bytes)

    def publish(self, parameter: int, weight: torch.Tensor) -> None:
        """Take ``weight`` for what an update of ours left in the parameter."""
        self._live().publish(parameter, weight.data_ptr())

    def unpublish(self, parameter: int) -> None:
        """Seed the master anew at the next update."""
        self._live().unpublish(parameter)

    def unchanged(self, parameter: int, weight: torch.Tensor) -> bool:
        """Return whether ``weight`` is what our last update left in the parameter."""
        return self._live().unchanged(parameter, weight.data_ptr())

    @property
    def is_poisoned(self) -> bool:
        """Whether something failed in the middle of a step, so that states are half updated."""
        return self._poison is not None

    def check_alive(self) -> None:
        """Raise PoisonedError or ForkError where nobody may go on.

        What failed behind the caller's back is raised as itself where it is seen first.
        """
        self._live()

    @contextmanager
    def whole_step(self, lent: object, *, is_open: bool = False) -> Iterator[None]:
        """Begin a step inside, or end one that ``is_open``, and count it; what is raised poisons.

        No signal handler runs inside: an interrupt is raised behind it, when the step is whole.
        ``lent`` is what the step reads and writes: a step that is left half way may do so still.
        """
        with SignalsDeferred():
            begun = self.steps_begun - is_open
            try:
                yield
            except BaseException as error:
                if self.steps_begun != begun:
                    self.lent.append(lent)
                    self.poison(error)
                raise

    def poison(self, error: BaseException) -> None:
        """Refuse everything from now on: ``error`` left the states half written.

        The first one is what all later ones come from, and is kept.
        """
        if self._poison is None:
            self._poison = error

    def traffic(self) -> Traffic:
        """Return what moved so far."""
        if self.resources.native is None or self._ring is None:
            return self._last_traffic
        now = self.resources.native.counters()
        return Traffic(
            bytes_read=int(now["bytes_read"]),
            bytes_written=int(now["bytes_written"]),
            bytes_spared=int(now["bytes_spared"]),
            chunks_updated=int(now["chunks_updated"]),
            ring_high_water_bytes=int(now["slots_high_water"]) * self._ring.plan.slot_bytes,
            wait_seconds=now["wait_seconds"],
        )

    def start_trace(self) -> None:
        """Begin an event log (bounded: the first 262,144 events are kept)."""
        self._tracing = True
        self._last_trace = []
        if self.resources.native is not None:
            self.resources.native.start_trace(_LONGEST_TRACE)

    def trace(self) -> list[TraceEvent]:
        """Return the event log so far, empty where none was begun."""
        if self.resources.native is None:
            return self._last_trace
        return [TraceEvent(*event) for event in self.resources.native.trace()]

    def close(self) -> None:
        """Drain and stop the threads. Idempotent; does nothing in a forked child."""
        if self._owner == os.getpid():
            self._last_traffic, self._last_trace = self.traffic(), self.trace()
            self.resources.close()
            self._chunks = []
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
        if self._untold is not None:
            untold, self._untold = self._untold, None
            raise untold
        if self._poison is not None:
            why = str(self._poison) or f"{type(self._poison).__name__} was raised in it."
            message = (
                f"This optimizer failed before and its states are half updated: {why} Load a"
                " checkpoint into a new optimizer; one over the directory of a run goes on from its"
                " last commit by resume()."
            )
            raise PoisonedError(message) from self._poison
        if self.resources.native is None:
            message = "This optimizer was closed: its states are gone. Make a new one."
            raise PoisonedError(message)
        return self.resources.native

    def _check(self, failure: Failure) -> None:
        if failure[0]:
            error = self._error_of(failure)
            self.poison(error)
            raise error

    def _error_of(self, failure: Failure) -> OSError:
        code, operation, file, _, offset, length = failure
        path = self._path_of(file)
        if code == _DAMAGED:
            return _damage(path, offset, length)
        return transfer_error(path, operation, code, offset, length)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _owner(tensor: torch.Tensor | None) -> torch.UntypedStorage | None:
    """Return what keeps the memory: a tensor does not, for its storage can be exchanged."""
    return None if tensor is None else tensor.untyped_storage()


def _damage(path: Path, offset: int, length: int) -> DamageError:
    message = (
        f"read of {length} bytes at offset {offset} of {path} gave other bytes than were written"
        " there: their checksum does not fit. Look at `dmesg` and the drive's health; go on from a"
        " snapshot, or from a checkpoint elsewhere."
    )
    return DamageError(message)
