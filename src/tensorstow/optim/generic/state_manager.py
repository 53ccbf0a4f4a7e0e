"""The states of one ``StowedOptimizer``: stores, steps, reads and sets them."""

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import tensorstow._native as _native
from tensorstow.base.directories import make_directories
from tensorstow.base.errors import OptionError, PoisonedError, TransferError
from tensorstow.base.health import OPTIMIZER_FAILED, OPTIMIZER_FORKED, Health
from tensorstow.io.scratch import ScratchFiles
from tensorstow.optim.generic.leaves import leaf_of
from tensorstow.optim.generic.owners import Round, exchange_values
from tensorstow.optim.generic.packing import LARGE_BYTES, cloned, pack, unpack
from tensorstow.optim.generic.piece_step import (
    Job,
    read_ahead,
    sliced_entry,
    step_in_ram,
    step_streamed,
)
from tensorstow.optim.generic.pieces import (
    PartitionedParam,
    Piece,
    expected_states,
    split_into_pieces,
)
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.optim.generic.transfers import Transfers, wanted_bytes
from tensorstow.states.memory import StateMemory
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.scratch import open_scratch
from tensorstow.states.state_store import Placement
from tensorstow.states.traffic import Traffic


class StateManager:
    """Keeps the states of parameters and moves their pieces through memory."""

    def __init__(
        self,
        stepper: Stepper,
        placement: Placement,
        policy: PipelinePolicy,
        *,
        elementwise: bool,
    ) -> None:
        """Check the placement; nothing is allocated before ``attach``."""
        make_directories(placement.directories)
        self._stepper = stepper
        self._placement = placement
        self._policy = policy
        self._elementwise = elementwise
        # By id: hashing a tensor is a call into Python. The values hold their parameters.
        self._params: dict[int, PartitionedParam] = {}
        self._transfers: Transfers | None = None
        self._scratch: list[ScratchFiles] = []
        self._health = Health(OPTIMIZER_FORKED, f"{OPTIMIZER_FAILED}.")
        # The list is filled later; a finalizer that refers to this object would keep it alive.
        self._finalizer = weakref.finalize(self, _release, self._scratch, self._health.owner)
        self.lock = threading.RLock()
        """Held while the ring is used: by a step, or to read or set states."""

    # --- parameters ---

    def find(self, parameter: torch.Tensor) -> PartitionedParam | None:
        """Return the entry of ``parameter``, or None."""
        return self._params.get(id(parameter))

    def params(self) -> Sequence[PartitionedParam]:
        """Return every entry, in the order of ``attach``."""
        return list(self._params.values())

    def attach(self, parameters: Sequence[tuple[Mapping[str, Any], torch.Tensor]]) -> None:
        """Keep the states of (group, parameter) from now on; those that are kept stay as they are.

        Raises BudgetError or DirectoryError before anything is changed.
        """
        self.live()
        new = [(g, p) for g, p in parameters if id(p) not in self._params]
        # As for Adam, the first parameters stay in RAM: their gradients come last.
        # A rank steps its own elements, or the whole of what it owns.
        shapes = [leaf_of(p).shape if self._elementwise else p.shape for _, p in new]
        in_ram = sum(s.numel() for s in shapes) * (1 - self._placement.disk_fraction)
        entries, seen = [], 0
        for (group, parameter), shape in zip(new, shapes, strict=True):
            leaf = leaf_of(parameter)
            seen += shape.numel()
            small = shape.numel() * leaf.element_size() < LARGE_BYTES
            pieces: list[Piece] = []
            if not small and seen > in_ram:
                pieces = split_into_pieces(
                    leaf,
                    elements=self._policy.chunk,
                    threads=self._stepper.threads,
                    elementwise=self._elementwise,
                )
            whole = None if shape == leaf.shape else shape
            expected = expected_states(self._stepper, group, parameter, pieces, whole)
            entries.append(PartitionedParam(parameter, shape, leaf.dtype, pieces, expected))
        if any(param.pieces for param in entries):
            self._make_room([*self._params.values(), *entries])
        self._params.update({id(param.parameter): param for param in entries})

    def _make_room(self, params: Sequence[PartitionedParam]) -> None:
        expected = [n for param in params for n in param.expected.piece_bytes]
        largest, total = max(expected, default=0), sum(expected)
        if self._transfers is None:
            # This raises BudgetError before any file is made.
            wanted_bytes(total, largest, self._placement.ram_budget)
            scratch = open_scratch(self._placement.directories, total, self._policy)
            self._scratch.append(scratch)
            self._transfers = Transfers(scratch, self._placement.ram_budget)
        self._transfers.make_room(total, largest)

    # --- a step ---

    def step(
        self,
        jobs: Sequence[Job],
        groups: Sequence[dict[str, Any]],
        state: MutableMapping[Any, Any],
        method: str = "step",
        closure: Callable[[], Any] | None = None,
        rounds: Sequence[Round] = (),
    ) -> None:
        """Update the parameters of ``jobs`` by the class's ``method``; writes continue afterwards.

        ``groups`` are all that there are, and ``state`` is where users see states. ``closure``
        returns the loss that there is, to a class that looks at it. ``rounds`` are of matrices
        whose parts other ranks have.
        """
        with (
            self.lock,
            self.failing(BaseException),
            self._stepper.split_step(groups, state, method, closure) as split_step,
        ):
            self._step_jobs(jobs)
            for matrices in rounds:
                if self._transfers is not None and self._policy.schedule != "naive":
                    # States are read while the ranks exchange the matrices.
                    read_ahead(self._transfers, [p for j in matrices.jobs for p in j.param.pieces])
                with matrices.gathered() as gathered:
                    self._step_jobs(gathered)
            if split_step is not None and rounds:
                # A rank that ran nothing has no values yet that others' could change.
                if not split_step.has_run:
                    self._stepper.run([])
                exchange_values(split_step, rounds)

    def _step_jobs(self, jobs: Sequence[Job]) -> None:
        if any(job.param.pieces for job in jobs):
            naive = self._policy.schedule == "naive"
            step_streamed(self._stepper, self._moves(), jobs, naive=naive)
        else:
            step_in_ram(self._stepper, jobs)

    # --- reading and setting ---

    def read(self, param: PartitionedParam) -> dict[str, Any]:
        """Return copies of the states of ``param`` on disk, in the parameter's shape."""
        whole: dict[str, Any] = {}
        with self.lock, self.failing(TransferError):
            for piece in param.pieces:
                if piece.extent is None:
                    continue
                part = unpack(piece.stowed, self._moves().read(piece))
                try:
                    if piece.partition is None:
                        return {name: cloned(value) for name, value in part.items()}
                    for name, tensor in part.items():
                        if name not in whole:
                            whole[name] = tensor.new_zeros(param.numel)
                        begin = piece.partition.start
                        whole[name][begin : begin + piece.partition.numel] = tensor
                finally:
                    self._moves().drop(piece)
        return {name: flat.view(param.shape) for name, flat in whole.items()}

    def put(self, param: PartitionedParam, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Set the states of ``param`` to ``entry``; return a copy of those that stay in RAM."""
        stowed: set[str] = set()
        with self.lock, self.failing(BaseException):
            for piece in param.pieces:
                partition = piece.partition
                part = entry if partition is None else sliced_entry(entry, partition, param.numel)
                packed = pack(part, piece.least_bytes)
                self._moves().drop(piece)
                self._moves().put(piece, packed)
                stowed |= packed.stowed.keys()
        return {name: cloned(value) for name, value in entry.items() if name not in stowed}

    def forget(self, param: PartitionedParam) -> None:
        """Drop the states of ``param`` on disk: a user emptied its state."""
        with self.lock, self.failing(BaseException):
            for piece in param.pieces:
                self._moves().forget(piece)

    # --- the whole ---

    def wait_written(self) -> None:
        """Wait until every write is complete."""
        with self.lock, self.failing(BaseException):
            if self._transfers is not None:
                self._transfers.wait_written()

    def memory(self, ram_bytes: int) -> StateMemory:
        """Return the bytes by place, ``ram_bytes`` of states being in RAM."""
        slots = [s for m in self._params.values() for p in m.pieces for s in p.slots]
        disk_bytes = sum(slot.nbytes for slot in slots)
        return StateMemory(
            logical_bytes=ram_bytes + disk_bytes,
            ram_bytes=ram_bytes,
            disk_bytes=disk_bytes,
            file_bytes=sum(scratch.used_bytes for scratch in self._scratch),
            ring_bytes=0 if self._transfers is None else self._transfers.capacity,
        )

    def predict(self) -> StateMemory:
        """Return what ``memory`` will return when every parameter has been stepped."""
        expected = [param.expected for param in self._params.values()]
        pieces = [n for e in expected for n in e.piece_bytes]
        ram_bytes = sum(e.ram_bytes for e in expected)
        disk_bytes = sum(e.disk_bytes for e in expected)
        return StateMemory(
            logical_bytes=ram_bytes + disk_bytes,
            ram_bytes=ram_bytes,
            disk_bytes=disk_bytes,
            file_bytes=sum(pieces),
            ring_bytes=wanted_bytes(
                sum(pieces), max(pieces, default=0), self._placement.ram_budget
            ),
        )

    def traffic(self) -> Traffic:
        """Return the bytes moved so far."""
        return Traffic(0, 0, 0, 0, 0.0) if self._transfers is None else self._transfers.traffic()

    @property
    def engine(self) -> _native.Engine | None:
        """The I/O engine. Tests put faults in here."""
        return self._scratch[0].engine if self._scratch else None

    def close(self) -> None:
        """Drop states, memory and files. Idempotent."""
        with self.lock:
            self._finalizer()
            self._params, self._transfers = {}, None
            self._scratch = []

    def is_alive(self) -> bool:
        """Return whether another step may be taken: nothing is closed, or has failed."""
        return self._finalizer.alive and self._health.failure is None

    def live(self) -> None:
        """Raise an error after a fork, an earlier failure, or a close."""
        self._health.check()
        if not self._finalizer.alive:
            message = "This optimizer was closed: its states are gone. Make a new one."
            raise PoisonedError(message)

    def _moves(self) -> Transfers:
        if self._transfers is None:
            message = "No piece is on disk."
            raise OptionError(message)
        return self._transfers

    @contextmanager
    def failing(self, kind: type[BaseException]) -> Iterator[None]:
        """Refuse everything after a ``kind`` of error inside: weights and states may not fit."""
        self.live()
        try:
            yield
        except kind as error:
            self._health.poison(error)
            raise


def _release(files: Sequence[ScratchFiles], owner: int) -> None:
    if owner == os.getpid():  # a forked child has neither the threads nor a right to the files
        for scratch in files:
            scratch.close()
