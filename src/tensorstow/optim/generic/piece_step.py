"""Steps one piece: unpacks its states, calls the class's step, packs the result."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from tensorstow.io.device_link import is_remote
from tensorstow.optim.generic.packing import (
    PackedEntry,
    cloned,
    pack,
    refuse_aliases,
    refuse_unsliced,
    tensors_in,
    unpack,
)
from tensorstow.optim.generic.partition import Partition
from tensorstow.optim.generic.pieces import PartitionedParam, Piece
from tensorstow.optim.generic.shared_values import StepBatch
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.optim.generic.transfers import Transfers
from tensorstow.tensors.dtensor import set_gradient


@dataclass(frozen=True, slots=True)
class Job:
    """A parameter that a step is to update."""

    group: Mapping[str, Any]
    param: PartitionedParam
    resident: dict[str, Any]
    """Its states in RAM, as in ``optimizer.state``."""
    leaf: torch.Tensor
    """The tensor that is stepped, with its gradient ([Note: Leaves])."""
    name: str | None = None
    """The parameter's name, if those of the group have names."""


def names_of(jobs: Sequence[Job]) -> list[str] | None:
    """Return the names of the parameters of ``jobs``, of one group; None if they have none."""
    names = [job.name for job in jobs if job.name is not None]
    return names if len(names) == len(jobs) else None


def step_piece(
    stepper: Stepper, job: Job, piece: Piece, region: torch.Tensor | None
) -> PackedEntry:
    """Step ``piece``, whose states are in ``region``; return its new states, packed.

    They are still in ``region``, unless the class created new tensors.
    """
    stowed = {} if region is None else unpack(piece.stowed, region)
    if piece.partition is None:
        packed = _step_whole(stepper, job, piece, stowed)
    else:
        last = piece is job.param.pieces[-1]
        packed = _step_slices(stepper, job, piece, stowed, last=last)
        if not last:
            return packed
    # The same dict stays in ``optimizer.state``.
    job.resident.clear()
    job.resident.update(packed.resident)
    return packed


def _step_whole(stepper: Stepper, job: Job, piece: Piece, stowed: dict[str, Any]) -> PackedEntry:
    parameter = job.leaf
    entry = {**stowed, **job.resident}
    new_entry = stepper.run([StepBatch(job.group, [(parameter, entry)], names_of([job]))])[0][0]
    packed = pack(new_entry, piece.least_bytes)
    # The class creates its states in the first step, so that one is checked.
    if not piece.stepped:
        _refuse_sharing(packed, stowed, parameter)
    return packed


def _step_slices(
    stepper: Stepper, job: Job, piece: Piece, stowed: dict[str, Any], *, last: bool
) -> PackedEntry:
    if piece.partition is None:
        message = "A whole parameter has no slices."
        raise AssertionError(message)
    parameter = job.leaf
    bounds = list(piece.partition.bounds)
    entries = []
    for (begin, end), leaf in zip(bounds, slices(parameter, piece.partition), strict=True):
        # Each slice steps the numbers from their old values; the last slice's result is kept.
        ours = last and end == piece.partition.numel
        numbers = dict(job.resident) if ours else cloned(dict(job.resident))
        entries.append((leaf, {**{k: v[begin:end] for k, v in stowed.items()}, **numbers}))
    with _torch_threads(stepper.threads):
        batch = StepBatch(job.group, entries, names_of([job] * len(entries)))
        new_entries = stepper.run([batch])[0]
    if not piece.stepped:
        for entry, (leaf, _) in zip(new_entries, entries, strict=True):
            _refuse_sharing(pack(entry, piece.least_bytes), stowed, leaf)
    return pack(_joined(new_entries, stowed, bounds), piece.least_bytes)


def slices(parameter: torch.Tensor, partition: Partition) -> Iterator[torch.Tensor]:
    """Yield the slices of a cut as parameters of their own, with their gradients."""
    flat = parameter.detach().view(-1)
    gradient = parameter.grad
    for begin, end in partition.bounds:
        leaf = flat[partition.start + begin : partition.start + end].requires_grad_(
            parameter.requires_grad
        )
        if gradient is not None:
            start, stop = partition.start + begin, partition.start + end
            set_gradient(leaf, gradient.detach().view(-1)[start:stop])  # of any dtype
        yield leaf


def _joined(
    entries: Sequence[Mapping[str, Any]],
    stowed: Mapping[str, torch.Tensor],
    bounds: Sequence[tuple[int, int]],
) -> dict[str, Any]:
    """Return the piece's entry: its slices' tensors joined, and the numbers of the last slice."""
    for entry, (begin, end) in zip(entries, bounds, strict=True):
        refuse_unsliced(entry, end - begin)
    joined: dict[str, Any] = {}
    for name, value in entries[-1].items():
        parts = [entry[name] for entry in entries]
        if not any(tensor.dim() for tensor in tensors_in(value)):
            joined[name] = value
            continue
        whole = stowed.get(name)
        same = whole is not None and all(
            part.data_ptr() == whole[begin:end].data_ptr()
            for part, (begin, end) in zip(parts, bounds, strict=True)
        )
        # Slices that were stepped in place are the ring's memory already.
        joined[name] = whole if same else torch.cat(parts)
    return joined


def sliced_entry(entry: Mapping[str, Any], partition: Partition, numel: int) -> dict[str, Any]:
    """Return the slices of a parameter's entry that belong to ``partition``, without numbers."""
    part = {}
    for name, value in entry.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.numel() == numel:
            part[name] = value.reshape(-1)[partition.start : partition.start + partition.numel]
    return part


def _refuse_sharing(
    packed: PackedEntry, stowed: Mapping[str, Any], parameter: torch.Tensor
) -> None:
    """Refuse states that share memory, as with the gradient; stowed ones may share the ring."""
    addresses = {tensor.data_ptr() for tensor in tensors_in(dict(stowed))}
    fresh = [tensor for _, tensor in packed.tensors if tensor.data_ptr() not in addresses]
    if fresh:
        refuse_aliases(fresh, parameter, "on disk", 'keep states="host"')


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    """Make torch use ``count`` threads inside the block."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_streamed(
    stepper: Stepper, transfers: Transfers, jobs: Sequence[Job], *, naive: bool
) -> None:
    """Step ``jobs``: first those whose states stay in RAM, while the first pieces are read.

    ``naive``: nothing is read ahead, and each piece is on disk before the next one is read.
    """
    steps = [(job, piece) for job in jobs for piece in job.param.pieces]
    pieces = [piece for _, piece in steps]
    ahead = 0 if naive else read_ahead(transfers, pieces)
    step_in_ram(stepper, [job for job in jobs if not job.param.pieces])
    for index, (job, piece) in enumerate(steps):
        region = None if piece.extent is None else transfers.read(piece)
        if piece.stepped and not naive:
            ahead = read_ahead(transfers, pieces, max(index + 1, ahead))
        packed = step_piece(stepper, job, piece, region)
        # ``put`` will allocate, and allows nothing to be read ahead then.
        if packed.slots != piece.slots:
            for other in pieces[index + 1 : ahead]:
                transfers.drop(other)
            ahead = index + 1
        transfers.put(piece, packed)
        if naive:
            transfers.wait_written()


def read_ahead(transfers: Transfers, pieces: Sequence[Piece], first: int = 0) -> int:
    """Start reading pieces from ``first`` on; return the index of the first that was not."""
    for index in range(first, len(pieces)):
        piece = pieces[index]
        # Read nothing after a new piece: it comes first, and will need room.
        if not piece.stepped or (piece.extent and not transfers.read_ahead(piece)):
            return index
    return len(pieces)


def step_in_ram(stepper: Stepper, jobs: Sequence[Job]) -> None:
    """Step parameters whose states stay in RAM: those of a group in one call."""
    away = [job for job in jobs if is_remote(job.leaf)]
    if len(jobs) > 1 and away:  # the device holds the states of one at a time
        for job in away:
            step_in_ram(stepper, [job])
        step_in_ram(stepper, [job for job in jobs if not is_remote(job.leaf)])
        return
    groups: dict[int, list[Job]] = {}
    for job in jobs:
        groups.setdefault(id(job.group), []).append(job)
    runs = [
        StepBatch(
            same[0].group,
            [(j.leaf, dict(j.resident)) for j in same],
            names_of(same),
        )
        for same in groups.values()
    ]
    if runs:
        for same, entries in zip(groups.values(), stepper.run(runs), strict=True):
            for job, entry in zip(same, entries, strict=True):
                job.resident.clear()
                job.resident.update(entry)
