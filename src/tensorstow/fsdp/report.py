"""What a stowed model's parameters hold and move, counted."""

from dataclasses import dataclass

from torch import nn

from tensorstow.fsdp.gradient_hooks import landed_bytes, landing_bytes
from tensorstow.fsdp.stowed_parameter import cell_of
from tensorstow.fsdp.uploads import uploads_of


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
    link_bytes_down: int
    """Of reduced gradients, from the device that computes; copies where that is not the CPU."""
    link_bytes_up: int
    """Of weights, to the device that computes, for it to gather."""
    pinned_bytes: int
    """Host memory that is pinned, for weights and gradients: where they stay or pass through."""
    staging_bytes: int
    """Host memory that weights pass through which the device cannot copy where they are."""
    device_bytes: int
    """The device's memory that weights pass through before they are gathered."""


def parameter_bytes(model: nn.Module) -> ParameterBytes:
    """Return what the parameters of a model that ``stow`` placed hold and have moved."""
    cells = [cell for p in model.parameters() if (cell := cell_of(p)) is not None]
    on_disk = [cell for cell in cells if cell.lessor is not None]
    rooms = {id(c.lessor.shelves): c.lessor.shelves for c in on_disk if c.lessor is not None}
    blocks = {id(c.block): c.block.pinned_bytes for c in cells if c.block is not None}
    uploads = uploads_of(model)
    return ParameterBytes(
        host_bytes=sum(cell.padded.nbytes for cell in cells if cell.lessor is None),
        disk_bytes=sum(cell.padded.nbytes for cell in on_disk),
        lent_bytes=sum(room.held_bytes for room in rooms.values()),
        most_lent_bytes=sum(room.high_water_bytes for room in rooms.values()),
        bytes_read=sum(room.bytes_read for room in rooms.values()),
        bytes_written=sum(room.bytes_written for room in rooms.values()),
        link_bytes_down=sum(cell.bytes_down for cell in cells) + landed_bytes(model),
        link_bytes_up=sum(cell.bytes_up for cell in cells),
        pinned_bytes=sum(blocks.values())
        + landing_bytes(model)
        + (0 if uploads is None else uploads.pinned_bytes),
        staging_bytes=0 if uploads is None else uploads.staging_bytes,
        device_bytes=0 if uploads is None else uploads.device_bytes,
    )
