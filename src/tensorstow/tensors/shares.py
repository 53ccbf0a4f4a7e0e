"""Parameters that are whole on every rank, with rows that each rank updates.

[Note: Shares] Below stage 3 a parameter is a plain tensor with all of its elements. A rank has the
states of its rows alone, the same rows as under FSDP2, and updates these; the new rows are gathered
after the update. The rows are a view of the parameter and share its version counter. Its reduced
gradient is in ``.grad``: a DTensor of the parameter's shape, of which a rank has its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# Keys are compared by identity: ``==`` of tensors compares their elements.
_SHARES: Any = WeakIdKeyDictionary()
_UNREDUCED: Any = WeakIdKeyDictionary()
"""Gradients of this rank alone, which stay in ``.grad`` until those of the last micro-batch."""


@dataclass(frozen=True, slots=True)
class RankShare:
    """This rank's rows of a parameter, among the ranks of a mesh."""

    start: int
    stop: int
    spec: Any
    """DTensorSpec of the DTensor that all ranks' rows would form."""
    dtensor: Any
    """The class DTensor, whose import takes half a second."""
    follow: Callable[[], Callable[[Any], None] | None]
    """A weak reference to a function, which takes each further optimizer that is to update the
    parameter: new rows are gathered after its steps."""

    @property
    def device_mesh(self) -> "DeviceMesh":
        """Return the mesh, as a DTensor has it."""
        mesh: DeviceMesh = self.spec.mesh
        return mesh

    @property
    def placements(self) -> Any:  # noqa: ANN401  # a DTensor's
        """Return the placements of the parameter on the mesh, as a DTensor has them."""
        return self.spec.placements

    def rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a parameter, or of a tensor like it: a view."""
        detached = whole.detach()
        return detached[self.start : self.stop] if detached.ndim else detached

    def sharded(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the DTensor whose rows on this rank are ``rows``."""
        meta = self.spec.tensor_meta._replace(dtype=rows.dtype)
        whole: torch.Tensor = self.dtensor(
            rows, replace(self.spec, tensor_meta=meta), requires_grad=False
        )
        return whole


def share_out(parameter: torch.Tensor, share: RankShare) -> None:
    """Make this rank update only its ``share`` of ``parameter`` from now on."""
    _SHARES[parameter] = share


def share_of(parameter: torch.Tensor) -> RankShare | None:
    """Return this rank's share of a parameter; None: the whole tensor is its own, or a DTensor."""
    if not _SHARES.data:  # its dict: steps ask this for every parameter
        return None
    share: RankShare | None = _SHARES.get(parameter)
    return share


def mark_unreduced(gradient: torch.Tensor) -> None:
    """Mark a gradient as this rank's alone: it is not ready for use."""
    _UNREDUCED[gradient] = True


def is_unreduced(gradient: torch.Tensor) -> bool:
    """Return whether a gradient is not yet summed over the ranks."""
    return bool(_UNREDUCED) and gradient in _UNREDUCED
