"""What a stowed model's parameters hold and move, counted."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tensorstow.engine.cells import Cell
from tensorstow.engine.stowed_parameter import StowedParameter


@dataclass(frozen=True, slots=True)
class ParameterBytes:
    """Bytes of one rank's parameters, padding included."""

    host_bytes: int
    """Of parameters that stay in host memory."""
    disk_bytes: int
    """Of parameters on disk."""
    lent_bytes: int
    """Host memory that parameters on disk hold now."""
    most_lent_bytes: int
    """The most that they held at once."""
    bytes_read: int
    bytes_written: int


def parameter_bytes(model: nn.Module) -> ParameterBytes:
    """Return what the parameters of a model that ``stow`` placed hold and have moved."""
    cells = [cell for p in model.parameters() if (cell := _cell_of(p)) is not None]
    on_disk = [cell for cell in cells if cell.lessor is not None]
    rooms = {id(c.lessor.shelves): c.lessor.shelves for c in on_disk if c.lessor is not None}
    return ParameterBytes(
        host_bytes=sum(cell.padded.nbytes for cell in cells if cell.lessor is None),
        disk_bytes=sum(cell.padded.nbytes for cell in on_disk),
        lent_bytes=sum(room.held_bytes for room in rooms.values()),
        most_lent_bytes=sum(room.high_water_bytes for room in rooms.values()),
        bytes_read=sum(room.bytes_read for room in rooms.values()),
        bytes_written=sum(room.bytes_written for room in rooms.values()),
    )


@torch.no_grad()
def _cell_of(parameter: nn.Parameter) -> Cell | None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else None
    return local.slot.cell if isinstance(local, StowedParameter) else None
