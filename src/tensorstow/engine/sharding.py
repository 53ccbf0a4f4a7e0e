"""A unit's parameters: from a module's own tensors to shards in host memory that FSDP2 gathers."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tensorstow.base.tiers import Tier
from tensorstow.engine.cells import Cell
from tensorstow.engine.loading import Rows
from tensorstow.engine.stowed_parameter import Slot, StowedParameter
from tensorstow.engine.units import Unit


@dataclass(frozen=True, slots=True)
class Sharding:
    """How units are sharded."""

    mesh: DeviceMesh
    device: torch.device
    precision: MixedPrecisionPolicy
    reshard_after_forward: bool

    @property
    def ranks(self) -> int:
        """Return among how many ranks a parameter is cut."""
        return self.mesh.size(self.mesh.ndim - 1)

    @property
    def rank(self) -> int:
        """Return which of them this is."""
        return self.mesh.get_local_rank(self.mesh.ndim - 1)

    def rows(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return the first and last row of this rank, and how many every rank's shard has.

        FSDP2 cuts the first dimension as ``torch.chunk`` does; the last shards may be short.
        """
        length = -(-shape[0] // self.ranks)
        start = min(self.rank * length, shape[0])
        return start, min(start + length, shape[0]), length


def shard(
    unit: Unit, tier: Tier, sharding: Sharding, sources: Mapping[str, Rows]
) -> list[tuple[DTensor, Cell]]:
    """Give a unit to FSDP2; return its sharded parameters that have cells: none on DEVICE.

    ``sources`` have the values; what was the module's tensor is let go of.
    """
    if tier == Tier.DEVICE:
        _fill(unit, sharding.device, sources)
        _apply(unit, sharding)
        return []
    slots: dict[str, Slot] = {}
    cells: dict[str, Cell] = {}
    for name, parameter in unit.parameters.items():
        cells[name] = _cell(parameter.shape, parameter.dtype, sharding, sources[name])
        slots[name] = Slot()
        stowed = StowedParameter(parameter.detach(), sharding.device, slots[name])
        exchange(unit.module, parameter, nn.Parameter(stowed, parameter.requires_grad))
    _apply(unit, sharding)
    for name, slot in slots.items():
        slot.cell = cells[name]
    known = {id(slot): slot.cell for slot in slots.values()}
    found: list[tuple[DTensor, Cell]] = []
    for parameter in unit.module.parameters():
        cell = known.get(id(_slot_of(parameter)))
        if cell is not None and isinstance(parameter, DTensor):
            found.append((parameter, cell))
    return found


def _cell(shape: torch.Size, dtype: torch.dtype, sharding: Sharding, source: Rows) -> Cell:
    start, stop, length = sharding.rows(shape)
    padded = torch.zeros((length, *shape[1:]), dtype=dtype, device="cpu")
    if stop > start:
        padded[: stop - start] = source(start, stop)
    return Cell(padded, stop - start)


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
