"""A unit's parameters: from a module's own tensors to shards in host memory that FSDP2 gathers."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tensorstow.base.sizes import round_up
from tensorstow.base.tiers import Tier
from tensorstow.fsdp.loading import Rows
from tensorstow.fsdp.prefetch import Prefetcher
from tensorstow.fsdp.shard_storage import Cell, ShelvedCell
from tensorstow.fsdp.single_rank import ReduceInPlace, Tenure
from tensorstow.fsdp.stowed_parameter import Slot, StowedParameter
from tensorstow.fsdp.units import Unit
from tensorstow.fsdp.uploads import Uploads
from tensorstow.io.buffer_pool import Shelves
from tensorstow.io.device_link import is_away
from tensorstow.io.pinned import PinnedBlock

SHELF_ALIGN = 128


@dataclass(frozen=True, slots=True)
class Sharding:
    """How units are sharded."""

    mesh: DeviceMesh
    device: torch.device
    precision: MixedPrecisionPolicy
    reshard_after_forward: bool
    reduction: Any = field(default_factory=ReduceInPlace)
    """What reduces gradients where the mesh has one rank and the device is the CPU."""
    uploads: Uploads | None = None
    """What takes shards to the device, where it has memory of its own."""

    @property
    def ranks(self) -> int:
        """Return among how many ranks a parameter is cut."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """Return which of them this is."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    @property
    def is_in_place(self) -> bool:
        """Return whether weights are whole where they are computed with: see one_rank."""
        return self.ranks == 1 and not is_away(self.device)

    def rows(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return the first and last row of this rank, and how many every rank's shard has.

        FSDP2 cuts the first dimension as ``torch.chunk`` does; the last shards may be short.
        """
        length = -(-shape[0] // self.ranks)
        start = min(self.rank * length, shape[0])
        return start, min(start + length, shape[0]), length


def shard(
    unit: Unit,
    tier: Tier,
    sharding: Sharding,
    sources: Mapping[str, Rows],
    storeroom: "Storeroom | None",
) -> list[tuple[DTensor, Cell]]:
    """Give a unit to FSDP2; return its sharded parameters that have cells: none on DEVICE.

    ``sources`` have the values; what was the module's tensor is let go of. ``storeroom``: where
    there are units on DISK.
    """
    if tier == Tier.DEVICE and is_away(sharding.device):  # else DEVICE and HOST are one
        _fill(unit, sharding.device, sources)
        _apply(unit, sharding)
        return []
    slots: dict[str, Slot] = {}
    cells = _cells(unit, sharding, storeroom if tier == Tier.DISK else None)
    _put(unit, cells, sharding, sources)
    for name, parameter in unit.parameters.items():
        slots[name] = Slot()
        stowed = StowedParameter(parameter.detach(), sharding.device, slots[name])
        exchange(unit.module, parameter, nn.Parameter(stowed, parameter.requires_grad))
    _apply(unit, sharding)
    for name, slot in slots.items():
        slot.cell = cells[name]
        slot.tenure = Tenure(cells[name]) if sharding.is_in_place else None
        slot.uploads = sharding.uploads
    if sharding.uploads is not None:
        sharding.uploads.add(
            list(cells.values()),
            [sharding.precision.param_dtype or cell.padded.dtype for cell in cells.values()],
            storeroom.prefetcher if storeroom is not None and tier == Tier.DISK else None,
        )
    known = {id(slot): slot.cell for slot in slots.values()}
    found: list[tuple[DTensor, Cell]] = []
    for parameter in unit.module.parameters():
        cell = known.get(id(_slot_of(parameter)))
        if cell is not None and isinstance(parameter, DTensor):
            found.append((parameter, cell))
    return found


@dataclass(frozen=True, slots=True)
class Storeroom:
    """Where units on DISK have their bytes."""

    shelves: Shelves
    prefetcher: Prefetcher


def shelf_bytes(unit: Unit, sharding: Sharding) -> int:
    """Return the bytes of this rank's padded shards of a unit, each aligned."""
    return sum(_padded_bytes(p, sharding) for p in unit.parameters.values())


def _cells(unit: Unit, sharding: Sharding, storeroom: Storeroom | None) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    nbytes = shelf_bytes(unit, sharding)
    shelf = storeroom.shelves.add(nbytes) if storeroom is not None and nbytes else None
    block = None
    if shelf is None and sharding.uploads is not None:
        link = sharding.uploads.link
        block = PinnedBlock(nbytes, link.device, link.settle)
    at = 0
    for name, parameter in unit.parameters.items():
        start, stop, length = sharding.rows(parameter.shape)
        shape = (length, *parameter.shape[1:])
        if shelf is not None and storeroom is not None:
            padded = shelf.tensor(at, shape, parameter.dtype)
            cells[name] = ShelvedCell(padded, stop - start, shelf, storeroom.prefetcher)
        elif block is not None:
            part = block.tensor(at, torch.Size(shape).numel(), parameter.dtype)
            own = part.view(shape).data  # a version counter of its own
            cells[name] = Cell(own, stop - start, block)
        else:
            zeros = torch.zeros(shape, dtype=parameter.dtype, device="cpu")
            cells[name] = Cell(zeros, stop - start)
        at += _padded_bytes(parameter, sharding)
    return cells


def _padded_bytes(parameter: torch.Tensor, sharding: Sharding) -> int:
    _, _, length = sharding.rows(parameter.shape)
    elements = length * parameter.shape[1:].numel()
    return round_up(elements * parameter.element_size(), SHELF_ALIGN)


@torch.no_grad()
def _put(
    unit: Unit, cells: Mapping[str, Cell], sharding: Sharding, sources: Mapping[str, Rows]
) -> None:
    with ExitStack() as opened:
        for cell in cells.values():
            opened.enter_context(cell.opened(to_change=True))
        for name, parameter in unit.parameters.items():
            start, stop, _ = sharding.rows(parameter.shape)
            if stop > start:
                cells[name].home.copy_(sources[name](start, stop))


def _fill(unit: Unit, device: torch.device, sources: Mapping[str, Rows]) -> None:
    for name, parameter in unit.parameters.items():
        values = sources[name](0, parameter.shape[0]).to(device)
        exchange(unit.module, parameter, nn.Parameter(values, parameter.requires_grad))


def _apply(unit: Unit, sharding: Sharding) -> None:
    fully_shard(
        unit.module,
        mesh=sharding.mesh,
        reshard_after_forward=sharding.reshard_after_forward,
        mp_policy=sharding.precision,
    )
    if sharding.is_in_place and isinstance(unit.module, FSDPModule):
        unit.module.set_custom_reduce_scatter(sharding.reduction)


def exchange(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` wherever a module has ``old``: tied parameters stay tied."""
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):  # noqa: SLF001
            if parameter is old:
                module._parameters[name] = new  # noqa: SLF001


def _slot_of(parameter: nn.Parameter) -> Slot | None:
    if not isinstance(parameter, DTensor):
        return None
    with torch.no_grad():
        local = parameter.to_local()
    return local.slot if isinstance(local, StowedParameter) else None
