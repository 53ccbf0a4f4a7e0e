"""The native pipeline over a set of chunks: begins steps, counts, reports failures."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch

import tensorstow._native as _native
from tensorstow.base.signals import SignalsDeferred
from tensorstow.base.sizes import format_count
from tensorstow.base.update_on import IN_STEP, UpdateTiming
from tensorstow.formats.reference import AdamScalars
from tensorstow.io import device_link
from tensorstow.states.chunks import Chunk, ChunkRing
from tensorstow.states.kernels import Caller, team_of
from tensorstow.states.layout import STATE_DTYPES
from tensorstow.states.native_handle import NativeHandle
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.stored_chunks import StoredChunk, StoredChunks
from tensorstow.states.traffic import TrafficCounters
from tensorstow.tensors.dtensor import PLAIN_TENSORS


class CallerChunks:
    """The chunks of a step that the caller updates (``StepKind``)."""

    def __init__(self, handle: NativeHandle, *, naive: bool) -> None:
        """Use the pipeline of ``handle``; ``naive``: a step ends after its writes."""
        self._handle = handle
        self._is_naive = naive

    def acquire(self, *, wait: bool) -> tuple[int, int] | None:
        """Return the next (chunk, slot) whose states are in memory and verified.

        Slot -1 means memory of the chunk's own. None: the step is over or has failed (``end``
        raises the error), or no chunk is ready and ``wait`` is False. A caller that holds a chunk
        must not wait, or it may block for ever.
        """
        chunk, slot = self._handle.live().acquire_chunk(wait=wait)
        return None if chunk < 0 else (chunk, slot)

    def release(self, chunk: int) -> None:
        """Return an acquired chunk whose memory holds the new states to the pipeline."""
        self._handle.live().release_chunk(chunk)

    def changes(self) -> int:
        """Return how often ``wait_change`` could have ended so far.

        It counts chunks that the step is done with or that can be acquired, and ``signal``.
        """
        return self._handle.live().changes()

    def wait_change(self, seen: int) -> None:
        """Block until ``changes`` is no longer ``seen``."""
        self._handle.check(self._handle.live().wait_change(seen))

    def signal(self) -> None:
        """Wake who waits for a change. Any thread may call, also after a failure."""
        if self._handle.native is not None:
            self._handle.native.signal()

    def end(self) -> None:
        """Wait until the step is complete; raise the pipeline's error if it failed."""
        native = self._handle.live()
        self._handle.check(native.wait_published())
        if self._is_naive:
            self._handle.check(native.quiesce())


DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The kernels' numbers for dtypes: csrc/kernels/kernels.h."""


class StepRow(NamedTuple):
    """The work of one step on one parameter; the default is none."""

    weight: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    """A contiguous gradient; None: no update."""
    seed_master: bool = False
    scalars: int = 0
    """Row of the step's table of scalars."""
    key: int = 0
    """Key of the random bits that inexact formats round with."""
    expected: bool = False
    """Whether the gradient may follow, in an open step."""
    keeps_weight: bool = False
    """Whether the caller keeps the old weight, and puts it back after ``undo``."""
    backup: torch.Tensor | None = None
    """Where the update puts the old weight first, in an undoable step."""


@dataclass(frozen=True, slots=True)
class StepKind:
    """How a step runs; csrc/pipeline/pipeline.h, StepSpec."""

    open: bool = False
    """Gradients follow one by one."""
    capture: bool = False
    """The writes include the new weights: a commit."""
    resident_first: bool = False
    """Resident chunks come before the others: the next forward needs them first."""
    newest_first: bool = False
    """The chunks whose gradients came last are updated first, of those that are there."""
    undoable: bool = False
    """``undo`` may take the open step back, until ``confirm``."""
    caller: Caller = "waits"

    @property
    def goes_on(self) -> bool:
        """Return whether the step still runs when the call returns."""
        return self.open or self.caller != "waits"


_WHOLE = StepKind()


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


class UpdatePipeline:
    """READ, UPDATE and WRITE of chunks in native threads."""

    def __init__(self, policy: PipelinePolicy, timing: UpdateTiming = IN_STEP) -> None:
        """Keep the options; ``connect`` adds the chunks."""
        # In alternating order a step begins with the chunks that the last one left in the ring.
        # During backward or forward the order is theirs.
        is_free = not (timing.begins_early or timing.waits_by_module)
        self._alternate = is_free and policy.schedule == "pipelined"
        self._policy = policy
        self._team = team_of(policy)
        self._lanes = {
            caller: f"update ({format_count(self._team.beside(caller), 'thread')})"
            for caller in get_args(Caller)
        }
        self.handle = handle = NativeHandle()
        self.stored = StoredChunks(handle)
        self.counters = TrafficCounters(handle)
        self._ring: ChunkRing | None = None
        self.steps_begun = 0
        """Number of steps that the native side has begun, or may have."""
        self.caller_chunks = CallerChunks(handle, naive=policy.schedule == "naive")
        self.memory = handle.resources.memory
        """Memory outside the ring that steps read and write: it outlives the native pipeline."""
        self.before_reading: Callable[[], None] = lambda: None
        """Called before states are read or set: makes updates that were deferred."""
        self.lock = threading.RLock()
        """Held while the ring is used: by a step, or to read or set states."""

    def connect(
        self,
        engine: _native.Engine,
        ring: ChunkRing,
        chunks: Sequence[Chunk],
        stored: Sequence[StoredChunk],
        path_of: Callable[[int], Path],
    ) -> None:
        """Serve ``chunks`` too from now on, all of them through ``ring``."""
        native = self.handle.native
        if native is None:
            isa = self._policy.isa
            native = _native.Pipeline(engine, isa, self._alternate, self._team)
            self.handle.resources.native = native
            self.counters.begin()
        # The native side takes a ring and chunks only while it is idle.
        self.wait_idle()
        if ring is not self._ring:
            plan = ring.plan
            native.set_ring(
                ring.address,
                (plan.slots, plan.slot_bytes),
                (plan.small_slots, plan.small_bytes),
                ring.memory,
            )
        self._ring, self.handle.path_of = ring, path_of
        self.counters.ring = ring.plan
        for chunk, on_disk in zip(chunks, stored, strict=True):
            chunk.number = native.add_chunk(
                chunk.family.native,
                [(r.parameter, r.start, r.position, r.count) for r in chunk.plan.runs],
                chunk.plan.elements,
                on_disk.place,
                [(view.data_ptr(), view.untyped_storage()) for view in chunk.resident],
                on_disk.blank,
                (on_disk.checksums, on_disk.weight_checksums),
                chunk.is_small,
            )

    def prefetch(self) -> None:
        """Start reading the first chunks of the next step, as many as the ring holds.

        Called from inside backward, so errors are left for ``step`` to raise.
        """
        if not self.handle.is_ours or self._policy.schedule == "naive":
            return
        # A signal handler could commit inside this hook: the thread that commits would wait for the
        # lock, and the handler for that thread.
        with SignalsDeferred():
            # If the lock is held the ring is in use; reading ahead can be skipped.
            if self.lock.acquire(blocking=False):
                try:
                    native = self.handle.native  # close() takes no lock
                    if native is not None and not self.handle.is_poisoned:
                        native.prefetch()
                finally:
                    self.lock.release()

    def step(
        self,
        rows: Sequence[StepRow] | _native.StepRows,
        scalars: Sequence[AdamScalars],
        kind: StepKind = _WHOLE,
    ) -> None:
        """Start one step; return when it is published, unless ``kind`` lets it run on.

        Rows that native code has gathered are those of a whole step. The native side keeps the
        memory of weights and gradients alive until it has used it.
        """
        with self.lock:
            native = self.handle.live()
            # Writes of the last step go on after its end, and may have failed since.
            self.handle.check(native.failure())
            self.counters.update_lane = self._lanes[kind.caller]
            self.steps_begun += 1  # first: after an exception the step counts as begun
            if isinstance(rows, _native.StepRows):
                failure = native.step(rows, scalars)
            else:
                failure = native.begin(
                    _table_of(rows),
                    scalars,
                    [_owner(r.weight) for r in rows],
                    [_owner(r.gradient) for r in rows],
                    open=kind.open,
                    capture=kind.capture,
                    resident_first=kind.resident_first,
                    newest_first=kind.newest_first,
                    undoable=kind.undoable,
                    caller=kind.caller,
                )
            # The next wait raises a failure of a step that still runs. This call never does,
            # because the time of the failure depends on the disk.
            if not kind.goes_on:
                self.handle.check(failure)
            if self._policy.schedule == "naive" and not kind.goes_on:
                self.wait_idle()

    def add_gradient(self, parameter: int, gradient: torch.Tensor) -> None:
        """Pass an open step a contiguous gradient, whose memory it holds as ``step`` does."""
        dtype = DTYPE_CODES[gradient.dtype]
        self.handle.live().add_gradient(
            parameter, gradient.data_ptr(), dtype, gradient.untyped_storage()
        )

    def add_chunk_gradients(
        self, chunk: int, pieces: Sequence[tuple[int, torch.Tensor | None]]
    ) -> None:
        """Pass an open step gradients of a chunk's pieces, each once; None: no gradient comes."""
        rows = [
            (n, _address(g), 0 if g is None else DTYPE_CODES[g.dtype], _owner(g)) for n, g in pieces
        ]
        self.handle.live().add_chunk_gradients(chunk, rows)

    def help(self) -> None:
        """Update what is ready in the calling thread, if the step is of a caller who ``helps``.

        A step that has failed raises its error where it is waited for.
        """
        native = self.handle.native
        if native is not None and self.handle.is_ours:
            native.help()

    def close_step(self) -> None:
        """End an open step: no more gradients come."""
        self.handle.live().close()

    def wait_published(self) -> None:
        """Block until every parameter of the step has its new weight."""
        self.handle.check(self.handle.live().wait_published())

    def wait_parameters(self, parameters: Sequence[int]) -> None:
        """Block until these parameters have their new weights."""
        self.handle.check(self.handle.live().wait_parameters(parameters))

    def wait_chunk(self, chunk: int) -> None:
        """Block until the step is done with a chunk: its weights are new, its gradients used."""
        self.handle.check(self.handle.live().wait_chunk(chunk))

    def is_updated(self, chunk: int) -> bool:
        """Return whether the step is done with a chunk."""
        return self.handle.live().is_updated(chunk)

    def is_published(self, parameter: int) -> bool:
        """Return whether the parameter has its new weight, and its gradient is not needed."""
        return self.handle.live().is_published(parameter)

    def wait_written(self) -> None:
        """Block until every write of the step is complete; states that were read ahead may stay.

        This is for a background thread: a failure is raised in it, and again to the caller at the
        next use of the pipeline.
        """
        self.handle.check(self.handle.live().wait_written(), in_background=True)

    def wait_idle(self, *, drop_ring: bool = False) -> None:
        """Wait until every write is complete and no buffer is in use.

        ``drop_ring``: then give the ring's pages back, with ``lock`` held; a step takes new ones.
        """
        if self.handle.is_begun:
            self.handle.check(self.handle.live().quiesce())
        if drop_ring and self._ring is not None:
            self._ring.drop_pages()

    def order(self, chunks: Iterable[int]) -> None:
        """Take chunks in this order from the next step on."""
        self.handle.live().set_order(list(chunks))

    def order_now(self) -> Sequence[int]:
        """Return the chunks in the order of the step in progress, or of the next one."""
        return self.handle.live().order()

    def confirm(self) -> None:
        """Make the updates of an undoable step (``StepKind``) final; the step is still open."""
        self.handle.live().confirm()

    def undo(self) -> None:
        """End an undoable step as if it had never begun, with the weights and states of before."""
        self.handle.check(self.handle.live().undo())

    def close(self) -> None:
        """Drain and stop the threads. Idempotent; does nothing in a forked child."""
        if self.handle.is_ours:
            self.counters.end()
            self.handle.close()


@contextmanager
def poisoning(pipeline: UpdatePipeline) -> Iterator[None]:
    """Poison the pipeline on an error in the block, which leaves the operation half done."""
    try:
        yield
    except BaseException as error:
        pipeline.handle.poison(error)
        raise


def _table_of(rows: Sequence[StepRow]) -> npt.NDArray[np.int64]:
    """Return the rows as the native side takes them."""
    table = [
        (
            _address(weight),
            _address(gradient),
            0 if gradient is None else DTYPE_CODES[gradient.dtype],
            *rest,
            _address(backup),
        )
        for weight, gradient, *rest, backup in rows
    ]
    # A table without rows keeps its columns.
    return np.array(table, dtype=np.int64).reshape(-1, 9)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _owner(tensor: torch.Tensor | None) -> torch.UntypedStorage | None:
    """Return the storage, which keeps the memory alive; a tensor's storage can be exchanged."""
    return None if tensor is None else tensor.untyped_storage()
