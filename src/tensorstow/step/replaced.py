"""Detects weights whose memory was replaced, written or freed during their update.

[Note: Replaced] The pipeline writes to the memory that a step was given, and keeps it alive until
the update is done. Reads through the parameter wait ([Note: Unpublished]), but not writes through
tensors that were taken before ``step()`` and share its memory, or through the shard of a DTensor.
Such values may be lost or old, so they are an error when the update is over. Memory that was freed
in place cannot be kept alive: this is reported only.
"""

from dataclasses import dataclass

import torch

from tensorstow.base.errors import OptionError
from tensorstow.step.managed_param import ManagedParam
from tensorstow.tensors.dtensor import shard_of

_WAY_OUT = (
    ' Call optimizer.wait() first, or use overlap="none"; resume() goes back to the last commit of'
    " a run that has dir=."
)


@dataclass(frozen=True, slots=True)
class WeightMemory:
    """The memory of one weight that a step writes to."""

    memory: torch.Tensor
    """Shares the parameter's memory, and keeps it where the parameter gets another."""
    nbytes: int
    """Of the storage."""

    @classmethod
    def of(cls, param: ManagedParam) -> "WeightMemory":
        """Return the current memory of ``param``."""
        memory = param.parameter.detach()
        return cls(memory, memory.untyped_storage().nbytes())

    def check(self, param: ManagedParam) -> None:
        """Raise OptionError where the weight, whose update is over, was replaced meanwhile."""
        if self.memory.untyped_storage().nbytes() < self.nbytes:
            raise _refusal(param, "was freed in place (by resize_ of its storage)")
        if _now(param).data_ptr() != self.memory.data_ptr():
            raise _refusal(param, "was given other memory")
        if param.written_by_others:
            raise _refusal(param, "was written")


def _now(param: ManagedParam) -> torch.Tensor:
    if param.owner is param.parameter:
        return param.parameter
    with torch.no_grad():
        return shard_of(param.owner)


def _refusal(param: ManagedParam, what: str) -> OptionError:
    message = (
        f"A weight of shape {tuple(param.owner.shape)} {what} between step() and the wait for"
        ' its update, which with overlap="forward" was under way: the parameter may hold values'
        f" from before the update.{_WAY_OUT}"
    )
    return OptionError(message)
