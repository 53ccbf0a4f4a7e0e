"""Parameters that are whole on every rank, of which each rank updates some rows.

[Note: Shares] Below stage 3 a parameter is a plain tensor with all of its elements. A rank has the
states of its rows alone, the same rows that FSDP2 would give it, and updates these; the new rows
are gathered behind the update. The rows are a view of the parameter and count versions with it. Its
reduced gradient is in ``.grad``: a DTensor of the parameter's shape, of which a rank has its rows.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_SHARES: Any = WeakIdKeyDictionary()
_UNREDUCED: Any = WeakIdKeyDictionary()
"""Gradients of this rank alone, which wait in ``.grad`` for those of the last micro-batch."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """This rank's rows of a parameter, among the ranks of a mesh."""

    start: int
    stop: int
    spec: Any
    """Of the DTensor that all ranks' rows would be (torch's DTensorSpec)."""
    dtensor: Any
    """The class DTensor, whose import takes half a second."""

    @property
    def device_mesh(self) -> "DeviceMesh":
        """Return the mesh, as a DTensor has it."""
        mesh: DeviceMesh = self.spec.mesh
        return mesh

    @property
    def placements(self) -> Any:  # noqa: ANN401  # a DTensor's
        """Return how the mesh cuts the parameter, as a DTensor has it."""
        return self.spec.placements

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a parameter, or of a tensor like it: a view."""
        detached = whole.detach()
        return detached[self.start : self.stop] if detached.ndim else detached

    def sharded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the DTensor of which ``rows`` are this rank's."""
        meta = self.spec.tensor_meta._replace(dtype=rows.dtype)
        whole: torch.Tensor = self.dtensor(
            rows, replace(self.spec, tensor_meta=meta), requires_grad=False
        )
        return whole


def share_out(parameter: torch.Tensor, share: RankShare) -> None:
    """Let this rank update its ``share`` of ``parameter`` alone, from now on."""
    _SHARES[parameter] = share


def share_of(parameter: torch.Tensor) -> RankShare | None:
    """Return this rank's share of a parameter; None: the whole tensor is its own, or a DTensor."""
    if not _SHARES:
        return None
    found: RankShare | None = _SHARES.get(parameter)
    return found


def mark_unreduced(gradient: torch.Tensor) -> None:
    """Note that a gradient is this rank's alone: nobody may use it yet."""
    _UNREDUCED[gradient] = True


def is_unreduced(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is to be summed over the ranks yet."""
    return bool(_UNREDUCED) and gradient in _UNREDUCED
