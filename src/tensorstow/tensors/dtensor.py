"""This rank's part of a DTensor and of its gradient: its rows, mesh and memory.

[Note: Shards] FSDP2 makes every parameter a DTensor, of which a rank holds one shard. States are
those of the shard, so code that reads bytes uses the shard, and the public interface (groups,
``optimizer.state``, names) uses the parameter. A shard whose bytes are in another tensor is an
``OffloadedWeight`` or an ``OffloadedGradient``, which gives access to them.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.io.device_link import DeviceEvent, is_remote
from tensorstow.tensors.placeholder import ConsumedGradient
from tensorstow.tensors.shares import RankShare, is_unreduced, share_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Stamp = tuple[int, ...]
_MOST_TERMS = 40
"""Terms of an exact sum: the 2,098 bits of all binary64 numbers, 53 in each term."""


class Pager(Protocol):
    """Memory of a shard whose bytes are on disk."""

    nbytes: int
    """Host memory that pinning it takes."""

    @property
    def is_in_files(self) -> bool:
        """Return whether the bytes are in files of the user's, which are only read."""

    def is_ready(self) -> bool:
        """Return whether a pin would wait for nothing."""

    def can_pin(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more can be pinned, keeping room for the largest buffer."""

    def expect(self, following: "Sequence[Self]") -> None:
        """Read the buffers that are used after this one, in order, as soon as memory is free."""

    def pin(self, *, for_write: bool = False) -> None:
        """Return when the bytes are in memory; they stay until ``unpin``."""

    def unpin(self, *, dirty: bool = False) -> None:
        """End a pin; ``dirty``: the bytes are to be written back."""

    def keep(self) -> None:
        """Keep the bytes on disk as they are: writes go to a second place."""

    def put_back(self) -> None:
        """Have the bytes again that ``keep`` has kept."""

    def confirm(self) -> None:
        """Keep the new bytes and not the old ones."""


class HostElements(DeviceEvent, Protocol):
    """Elements in host memory, complete after the event of their copies."""

    memory: torch.Tensor
    """The memory of ``elements``, without waiting for their copies."""

    @property
    def elements(self) -> torch.Tensor:
        """The elements, after waiting for their copies."""


class OffloadedWeight(torch.Tensor):
    """A shard of a parameter whose bytes are in another tensor, in host memory or on disk."""

    @property
    def local_shard(self) -> torch.Tensor:
        """This rank's elements in host memory, without padding; those on disk while pinned."""
        raise NotImplementedError

    @property
    def pager(self) -> Pager | None:
        """The disk-backed buffer that ``local_shard`` is in; None: it stays in host memory."""
        raise NotImplementedError


class OffloadedGradient(torch.Tensor):
    """A gradient whose elements are in another tensor, in host memory."""

    host: HostElements


PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
"""Classes of tensors that have their bytes in memory, where kernels access them."""


def is_sharded(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Return whether ``tensor`` is a DTensor, whose import takes half a second."""
    return type(tensor) not in PLAIN_TENSORS and hasattr(tensor, "device_mesh")


def computes_on_accelerator(parameter: torch.Tensor) -> bool:
    """Return whether forward and backward use ``parameter`` on an accelerator, wherever it lies."""
    return is_remote(parameter) or (
        is_sharded(parameter) and parameter.device_mesh.device_type != "cpu"
    )


def stamp_of(parameter: torch.Tensor, owner: torch.Tensor | None = None) -> Stamp:
    """Return version counters and address, which change when the parameter is written or replaced.

    Writing a DTensor changes its own counter, not its shard's.
    """
    whole = parameter if owner is None else owner
    return parameter._version, parameter.data_ptr(), whole._version  # noqa: SLF001


def layout_of(parameter: torch.Tensor) -> "DTensor | RankShare | None":
    """Return an object with a parameter's mesh and placements; None: this rank has it alone."""
    return parameter if is_sharded(parameter) else share_of(parameter)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard; ``tensor`` itself if it is no DTensor. Called often in a step."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _local_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a parameter, by its shard or its share."""
    share = share_of(parameter)
    if share is not None:
        return share.rows(parameter)
    return parameter if type(parameter) in PLAIN_TENSORS else to_local(parameter)


def shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this rank's elements of ``parameter``; itself for most."""
    local = _local_of(parameter)
    return local.local_shard if isinstance(local, OffloadedWeight) else local


def is_in_storage(parameter: torch.Tensor) -> bool:
    """Return whether a parameter's elements are in a storage of ours, which is never replaced."""
    return isinstance(getattr(parameter, "_local_tensor", parameter), OffloadedWeight)


Order = tuple[int, ...]


def order_of(tensor: torch.Tensor) -> Order | None:
    """Return the dimensions from the slowest to the fastest if they are in another order.

    [Note: Memory formats] Updates run over one run of bytes. A tensor that fills one in another
    order (``channels_last``, a transposed one) is used with its dimensions in the order of its
    memory, which makes it contiguous; its gradient likewise, and its states are laid out so. Users
    see all of them in the parameter's own shape, as torch's optimizers have them. None for a
    contiguous tensor, and for one that does not fill a run of bytes.
    """
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return None
    order = tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else None


def in_order(tensor: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Return ``tensor`` with its dimensions in ``order``; itself for None."""
    return tensor if order is None else tensor.permute(order)


def out_of_order(tensor: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Undo ``in_order``."""
    if order is None:
        return tensor
    return tensor.permute(tuple(sorted(range(len(order)), key=order.__getitem__)))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory, apart from autograd and its version counter."""
    data = tensor.data
    return in_order(data, order_of(data)).view(-1)


def pager_of(parameter: torch.Tensor) -> Pager | None:
    """Return the buffer that the shard of ``parameter`` is in; None: it stays in memory."""
    local = _local_of(parameter)
    return local.pager if isinstance(local, OffloadedWeight) else None


def in_memory(parameter: torch.Tensor, *, for_write: bool = False) -> AbstractContextManager[None]:
    """Pin the shard of ``parameter`` in memory inside the block; no-op if it is resident."""
    return pinned_by(pager_of(parameter), for_write=for_write)


@contextmanager
def pinned_by(pager: Pager | None, *, for_write: bool = False) -> Iterator[None]:
    """Pin the buffer for the block; ``for_write``: it is written back. No-op for None."""
    if pager is None:
        yield
        return
    pager.pin(for_write=for_write)
    try:
        yield
    finally:
        pager.unpin(dirty=for_write)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's elements of the gradient of ``parameter``, or None.

    A ConsumedGradient if an update has begun. A gradient that is sharded in another way than its
    parameter (tensor parallelism leaves ``Partial`` ones, of which each rank has a summand) is
    redistributed to the parameter's sharding, a collective of all ranks.
    """
    gradient = parameter.grad
    if gradient is None or isinstance(gradient, ConsumedGradient):
        return gradient
    layout = layout_of(parameter)
    if layout is None and type(gradient) in PLAIN_TENSORS:
        return gradient
    if layout is not None and is_sharded(gradient):
        wanted = layout.placements
        if gradient.placements != wanted:
            with torch.no_grad():
                # It stays in ``.grad``, so that a later call needs no collective.
                parameter.grad = gradient = gradient.redistribute(placements=wanted)
    elif isinstance(layout, RankShare):  # set by the user, or to create states before loading
        return None if is_unreduced(gradient) else layout.rows(gradient)
    local = to_local(gradient)
    return local.host.elements if isinstance(local, OffloadedGradient) else local


def set_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Set ``parameter.grad`` to a gradient of any dtype: sums are wider than weights."""
    # None lifts torch's check that a gradient has its parameter's dtype.
    parameter.grad_dtype = None
    parameter.grad = gradient


def gradient_and_event(parameter: torch.Tensor) -> tuple[torch.Tensor | None, DeviceEvent | None]:
    """Return the result of ``gradient_of``, and the event of its copy; None: it is complete."""
    gradient = parameter.grad
    if gradient is not None and (is_sharded(gradient) or layout_of(parameter) is None):
        local = to_local(gradient)
        if isinstance(local, OffloadedGradient) and not local.host.query():
            return local.host.memory, local.host
    return gradient_of(parameter), None


def gradient_in_order(shard: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient as contiguous elements, in the order of the shard's memory."""
    if shard.is_contiguous() and gradient.is_contiguous():
        return gradient
    return in_order(gradient, order_of(shard)).contiguous()


def has_offloaded_gradient(parameter: torch.Tensor) -> bool:
    """Return whether the gradient of ``parameter`` is in host memory, on any compute device."""
    gradient = parameter.grad
    return gradient is not None and isinstance(to_local(gradient), OffloadedGradient)


def sharded_like(parameter: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """Return ``shard`` as the local part of a DTensor like ``parameter``; else ``shard`` itself.

    The shard stays on its device.
    """
    share = share_of(parameter)
    if share is not None:
        return share.sharded(shard)
    if not is_sharded(parameter):
        return shard
    # from_local would move a shard in host memory to the devices of the mesh.
    spec: Any = parameter._spec  # noqa: SLF001  # as FSDP2 does for parameters in host memory
    meta = spec.tensor_meta._replace(dtype=shard.dtype)
    kind: Any = type(parameter)
    whole: torch.Tensor = kind(shard, replace(spec, tensor_meta=meta), requires_grad=False)
    return whole


@torch.no_grad()
def part_of(whole: torch.Tensor, parameter: torch.Tensor, name: str) -> torch.Tensor:
    """Return this rank's elements of ``whole``, which is a whole tensor or a DTensor.

    Raises OptionError if it is sharded over other ranks, or if the parameter is ``Partial``.
    """
    layout = layout_of(parameter)
    if is_sharded(whole):
        if layout is None:
            return whole.full_tensor()
        if whole.device_mesh != layout.device_mesh:
            message = (
                f"{name} is a DTensor over {whole.device_mesh}, and its parameter is sharded over"
                f" {layout.device_mesh}. Let torch.distributed.checkpoint load it, which"
                " reshards."
            )
            raise OptionError(message)
        return whole.redistribute(placements=layout.placements).to_local()
    if layout is None:
        return whole
    part = whole.reshape(parameter.shape)
    mesh = layout.device_mesh
    for mesh_dim, placement in _in_order_of_cuts(layout.placements):
        if placement.is_partial():
            message = (
                f"{name} is whole and its parameter is sharded as {placement}: pass a DTensor, as"
                " torch.distributed.checkpoint.state_dict.set_optimizer_state_dict does."
            )
            raise OptionError(message)
        part = _piece(part, mesh, mesh_dim, placement.dim)
    return part


def _in_order_of_cuts(placements: Sequence[Any]) -> list[tuple[int, Any]]:
    """Return (mesh dimension, placement) of all but replicated dimensions, in order of the cuts.

    FSDP2 shards along an outer mesh dimension, after the cuts of tensor parallelism: such
    placements (torch's ``_StridedShard``, whose ``is_shard()`` is False) come last.
    """
    cuts = [(i, p) for i, p in enumerate(placements) if not p.is_replicate()]
    return sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor"))


def _piece(tensor: torch.Tensor, mesh: "DeviceMesh", mesh_dim: int, dim: int) -> torch.Tensor:
    """Return this rank's piece of ``torch.chunk``'s equal pieces; the last ones may be empty."""
    # Not get_local_rank, which asks a process group: torch's cache of DTensor operations may return
    # an equal mesh of a group that has been destroyed since.
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        message = f"This rank has no part of a parameter over {mesh}: call it on its ranks."
        raise OptionError(message)
    start, stop = rows_of_rank(tensor.shape[dim], coordinate[mesh_dim], mesh.size(mesh_dim))
    return tensor.narrow(dim, start, stop - start)


def rows_per_rank(length: int, ranks: int) -> int:
    """Return how many of ``length`` rows a rank's shard has, padded to be the same on all ranks."""
    return -(-length // ranks)


def rows_of_rank(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's first row of ``length``, and the one after its last.

    FSDP2 cuts as ``torch.chunk`` does: the last ranks may have fewer rows, or none.
    """
    rows = rows_per_rank(length, ranks)
    return min(length, rows * rank), min(length, rows * (rank + 1))


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive rows of a tensor: those of its first dimension."""

    start: int
    count: int
    whole: int
    """The rows of the whole tensor."""


def rows_of(parameter: torch.Tensor) -> Rows | None:
    """Return this rank's rows of ``parameter``, of which it may have all.

    None if the parameter is cut along another dimension, has none, or is not on this rank.
    """
    layout = layout_of(parameter)
    if not parameter.ndim:
        return None
    start, count = 0, parameter.shape[0]
    if layout is None:
        return Rows(0, count, count)
    mesh, coordinate = layout.device_mesh, layout.device_mesh.get_coordinate()
    for mesh_dim, placement in _in_order_of_cuts(layout.placements):
        if placement.is_partial() or placement.dim or coordinate is None:
            return None
        first, end = rows_of_rank(count, coordinate[mesh_dim], mesh.size(mesh_dim))
        start, count = start + first, end - first
    return Rows(start, count, parameter.shape[0])


def groups_of(parameter: torch.Tensor) -> list[dist.ProcessGroup]:
    """Return the groups of ranks among which ``parameter`` is sharded, one per mesh dimension.

    There are several if it is sharded over several dimensions (FSDP2 over tensor parallelism), and
    none if this rank has it whole. Replicas of a shard have groups of their own.
    """
    layout = layout_of(parameter)
    if layout is None:
        return []
    mesh = layout.device_mesh
    dims = [i for i, _ in _in_order_of_cuts(layout.placements) if mesh.size(i) > 1]
    # By mesh dimension: sums over several groups are added in this order.
    return [mesh.get_group(i) for i in sorted(dims)]


def sum_over_shards(parameters: Sequence[torch.Tensor], parts: Sequence[float]) -> list[float]:
    """Return the sum over ranks of each parameter's part: the same number on every rank.

    The order of additions is that of ranks along one mesh dimension, then the next.
    """
    sums = list(parts)
    for group, indices in _by_group(parameters).items():
        for index, total in zip(indices, _sum(group, [sums[i] for i in indices]), strict=True):
            sums[index] = total
    return sums


def fsum_over_shards(parameters: Sequence[torch.Tensor], parts: Sequence[Sequence[float]]) -> float:
    """Return the sum of all parts of all ranks' shards, rounded once.

    Each rank sends its exact sum, as binary64 numbers that add up to it: so the result depends
    neither on the order of additions nor on which rank has which part.
    """
    sharded: dict[tuple[dist.ProcessGroup, ...], list[float]] = {}
    for parameter, values in zip(parameters, parts, strict=True):
        sharded.setdefault(tuple(groups_of(parameter)), []).extend(values)
    total: list[float] = []
    for groups, values in sharded.items():
        mine = _exact_sum(values)
        for group in groups:
            # Padded, because all ranks must send as many numbers.
            by_rank = numbers_of_ranks(group, [*mine, *[0.0] * (_MOST_TERMS - len(mine))])
            mine = _exact_sum([term for terms in by_rank for term in terms])
        total += mine
    return math.fsum(total)


def _exact_sum(values: Sequence[float]) -> list[float]:
    """Return numbers whose sum is exactly that of ``values``, the largest first."""
    terms: list[float] = []
    while (rest := math.fsum([*values, *(-term for term in terms)])) != 0.0:
        terms.append(rest)
        # An infinity or NaN leaves no rest of 0, and the loop would not end.
        if not math.isfinite(rest):
            break
    return terms


def anywhere(parameters: Sequence[torch.Tensor], *, on_this_rank: bool) -> bool:
    """Return whether ``on_this_rank`` is true on any rank that has a shard of ``parameters``."""
    on_any_rank = on_this_rank
    for group in _by_group(parameters):
        on_any_rank = _sum(group, [float(on_any_rank)])[0] > 0.0
    return on_any_rank


def _by_group(parameters: Sequence[torch.Tensor]) -> dict[dist.ProcessGroup, list[int]]:
    """Return the indices of the parameters that are sharded among each group of ranks.

    Every rank has the groups in the same order, so collectives in that order match.
    """
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for index, parameter in enumerate(parameters):
        for group in groups_of(parameter):
            groups.setdefault(group, []).append(index)
    return groups


def numbers_of_ranks(group: dist.ProcessGroup, values: Sequence[float]) -> list[list[float]]:
    """Return every rank's ``values``, as many on each, by rank in ``group``; collective."""
    mine = torch.tensor(values, dtype=torch.float64, device=device_of(group))
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, mine, group=group)
    return [rank.tolist() for rank in all_ranks]


def _sum(group: dist.ProcessGroup, values: Sequence[float]) -> list[float]:
    return [sum(parts) for parts in zip(*numbers_of_ranks(group, values), strict=True)]


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device of the group's collectives: the CPU if it is supported."""
    devices = group._device_types  # noqa: SLF001  # no public way
    return torch.device("cpu") if torch.device("cpu") in devices else devices[0]
