"""Moves whole matrices and their parts between ranks, as bytes: nothing is rounded or summed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError, RankError
from tensorstow.base.sizes import round_up
from tensorstow.optim.generic.leaves import leaf_of, leaf_with_gradient
from tensorstow.optim.generic.packing import map_leaves
from tensorstow.tensors.dtensor import device_of, rows_of_rank, sharded_like
from tensorstow.tensors.shares import share_of

_ALIGN = 16
"""Parts begin at multiples of it: a view of any dtype needs that."""


@dataclass(frozen=True, eq=False, slots=True)
class OwnedMatrix:
    """A sharded parameter that one rank steps whole; a vector, too."""

    parameter: torch.Tensor
    shape: torch.Size
    dtype: torch.dtype
    group: dist.ProcessGroup
    """The ranks that have its parts."""
    dim: int
    """The dimension that is cut."""
    owner: int
    """The owner's rank in ``group``."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole weight."""
        return self.shape.numel() * self.dtype.itemsize

    @property
    def is_here(self) -> bool:
        """Return whether this rank is the owner."""
        return dist.get_rank(self.group) == self.owner

    def check(self, name: str, entry: Mapping[str, Any]) -> None:
        """Raise OptionError if the parameter was replaced, or has states on another rank."""
        parameter = self.parameter
        if parameter.shape != self.shape or parameter.dtype != self.dtype:
            message = (
                f"{name} was {self.dtype} of shape {tuple(self.shape)} when it was taken up, and is"
                f" {parameter.dtype} of shape {tuple(parameter.shape)} now. Cast or exchange the"
                " model's weights first, then make the optimizer."
            )
            raise OptionError(message)
        if entry and not self.is_here:
            message = (
                f"optimizer.state has states of {name} on a rank that does not step it: rank"
                f" {self.owner} of those that share it does. Set them there, or by"
                " load_state_dict() on every rank."
            )
            raise OptionError(message)

    def part(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's part of a tensor of the matrix's shape: a view."""
        start, stop = rows_of_rank(self.shape[self.dim], rank, dist.get_world_size(self.group))
        return whole.narrow(self.dim, start, stop - start)


class _Segments:
    """Bytes for each rank of a group, or from each: tensors one after the other, aligned."""

    def __init__(self, ranks: int) -> None:
        self.sizes = [0] * ranks
        self._places: list[tuple[int, int, torch.Size, torch.dtype]] = []
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def add(self, rank: int, shape: torch.Size, dtype: torch.dtype) -> int:
        """Add a tensor to a rank's segment; return its number."""
        self._places.append((rank, self.sizes[rank], shape, dtype))
        self.sizes[rank] += round_up(shape.numel() * dtype.itemsize, _ALIGN)
        return len(self._places) - 1

    def allocate(self, device: torch.device) -> None:
        """Allocate the bytes of all that was added."""
        self.buffer = torch.empty(sum(self.sizes), dtype=torch.uint8, device=device)

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return a tensor that was added."""
        rank, offset, shape, dtype = self._places[number]
        start = sum(self.sizes[:rank]) + offset
        stop = start + shape.numel() * dtype.itemsize
        return self.buffer[start:stop].view(dtype).view(shape)

    def send(self, received: "_Segments", group: dist.ProcessGroup) -> None:
        """Send each rank its segment, and receive one from each; collective. Frees the buffer."""
        dist.all_to_all_single(
            received.buffer, self.buffer, received.sizes, self.sizes, group=group
        )
        self.buffer = self.buffer.new_empty(0)


@torch.no_grad()
def gather(matrices: Sequence[OwnedMatrix]) -> list[torch.Tensor]:
    """Return the leaves of this rank's matrices, whole, with their gradients; collective."""
    group = matrices[0].group
    ranks = dist.get_world_size(group)
    sent, received = _Segments(ranks), _Segments(ranks)
    parts: list[tuple[int, torch.Tensor]] = []
    wholes: list[tuple[torch.Tensor, list[tuple[int, torch.Tensor]]]] = []
    leaves: list[torch.Tensor] = []
    for matrix in matrices:
        shard = leaf_with_gradient(matrix.parameter)
        gradient = None if shard is None else shard.grad
        shard = leaf_of(matrix.parameter) if shard is None else shard
        is_shared = share_of(matrix.parameter) is not None
        sources = [gradient, None if is_shared else shard.detach()]
        parts += [(sent.add(matrix.owner, s.shape, s.dtype), s) for s in sources if s is not None]
        if matrix.is_here:
            # Below stage 3 every rank has the whole weight, and the owner steps it where it is.
            leaf = matrix.parameter.detach() if is_shared else shard.new_empty(matrix.shape)
            whole_gradient = None if gradient is None else gradient.new_empty(matrix.shape)
            for whole in (whole_gradient, None if is_shared else leaf):
                if whole is not None:
                    views = [matrix.part(whole, r) for r in range(ranks)]
                    numbers = [received.add(r, v.shape, v.dtype) for r, v in enumerate(views)]
                    wholes.append((whole, list(zip(numbers, views, strict=True))))
            leaf.requires_grad_()
            # Sums of micro-batches are wider than 16-bit weights.
            leaf.grad_dtype = None
            leaf.grad = whole_gradient
            leaves.append(leaf)
    device = leaf_of(matrices[0].parameter).device
    # The tensors of all ranks are in one buffer, whose size is known only now.
    sent.allocate(device)
    received.allocate(device)
    for number, source in parts:
        sent[number].copy_(source)
    sent.send(received, group)
    for _, places in wholes:
        for number, view in places:
            view.copy_(received[number])
    return leaves


@torch.no_grad()
def scatter(matrices: Sequence[OwnedMatrix], leaves: Sequence[torch.Tensor] | None) -> None:
    """Send the new parts of this rank's matrices, or that it failed (None); collective.

    Raises RankError if another rank failed.
    """
    group = matrices[0].group
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = _Segments(ranks), _Segments(ranks)
    one = torch.Size((1,))
    # Each rank also sends whether it failed, in the same exchange.
    statuses = [sent.add(r, one, torch.uint8) for r in range(ranks)]
    answers = [received.add(r, one, torch.uint8) for r in range(ranks)]
    parts: list[tuple[int, torch.Tensor]] = []
    targets: list[tuple[int, torch.Tensor]] = []
    wholes = iter(leaves or ())
    for matrix in matrices:
        shard = leaf_of(matrix.parameter).detach()
        if matrix.is_here:
            leaf = next(wholes, None)
            for r in range(ranks):
                shape = matrix.part(torch.empty(matrix.shape, device="meta"), r).shape
                # A rank that failed sends as many bytes: the others wait for them.
                number = sent.add(r, shape, matrix.dtype)
                if leaf is not None:
                    parts.append((number, matrix.part(leaf.detach(), r)))
        targets.append((received.add(matrix.owner, shard.shape, shard.dtype), shard))
    device = leaf_of(matrices[0].parameter).device
    sent.allocate(device)
    received.allocate(device)
    for number in statuses:
        sent[number].fill_(leaves is None)
    for number, part in parts:
        sent[number].copy_(part)
    sent.send(received, group)
    failed = [r for r, number in enumerate(answers) if received[number].item() and r != rank]
    # A rank that has failed itself raises its own error.
    if failed and leaves is not None:
        message = (
            f"The step of a matrix failed on rank {failed[0]} of the ranks that share it: that rank"
            " has the traceback. Weights are half updated: go on from a checkpoint."
        )
        raise RankError(message)
    if leaves is not None:
        for number, shard in targets:
            shard.copy_(received[number])


@dataclass(frozen=True, slots=True)
class _Absent:
    """A tensor that the owner has."""

    index: int
    dtype: torch.dtype
    shape: torch.Size

    def empty(self) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype)


def spread(matrix: OwnedMatrix, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states that ``entry`` has at the owner, on every rank; collective.

    States of the parameter's shape are DTensors like it; other tensors are whole on each rank.
    """
    tensors: list[torch.Tensor] = []

    def put(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return _Absent(len(tensors) - 1, leaf.dtype, leaf.shape)

    device = device_of(matrix.group)
    # The structure goes first: other ranks allocate tensors by it.
    frame = [map_leaves(dict(entry), put)] if matrix.is_here else [None]
    dist.broadcast_object_list(frame, group=matrix.group, group_src=matrix.owner, device=device)

    def get(leaf: object) -> object:
        if not isinstance(leaf, _Absent):
            return leaf
        tensor = tensors[leaf.index].contiguous() if matrix.is_here else leaf.empty()
        # The group may support device memory alone.
        tensor = tensor.to(device)
        dist.broadcast(tensor, group=matrix.group, group_src=matrix.owner)
        return tensor.to("cpu")

    states: dict[str, Any] = {}
    for name, value in (frame[0] or {}).items():
        is_cut = isinstance(value, _Absent) and value.shape == matrix.shape
        states[name] = _spread_part(matrix, value, tensors) if is_cut else map_leaves(value, get)
    return states


def _spread_part(
    matrix: OwnedMatrix, absent: _Absent, tensors: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return a DTensor of the owner's tensor, cut as the parameter is; collective."""
    rank, ranks = dist.get_rank(matrix.group), dist.get_world_size(matrix.group)
    sent, received = _Segments(ranks), _Segments(ranks)
    shape = matrix.part(torch.empty(matrix.shape, device="meta"), rank).shape
    number = received.add(matrix.owner, shape, absent.dtype)
    views: list[torch.Tensor] = []
    if matrix.is_here:
        views = [matrix.part(tensors[absent.index], r) for r in range(ranks)]
    numbers = [sent.add(r, view.shape, view.dtype) for r, view in enumerate(views)]
    device = device_of(matrix.group)
    sent.allocate(device)
    received.allocate(device)
    for index, view in zip(numbers, views, strict=True):
        sent[index].copy_(view)
    sent.send(received, matrix.group)
    # A view would keep the whole buffer alive.
    return sharded_like(matrix.parameter, received[number].to("cpu", copy=True))
