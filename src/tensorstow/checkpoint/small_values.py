"""What a commit holds besides states and weights: groups, ``extra`` and the module's other tensors.

[Note: One moment] All that a commit holds is of one moment: of the line at which ``commit()``,
``snapshot()`` or ``close()`` is called, or of the end of a step. A commit after an exception, or of
an optimizer that nobody closed, is of the last step's end. By then the next batch may be drawn, a
schedule may have stepped, and an interrupted forward may have changed buffers. So small values are
copied at the end of each step. The commit is not made, and the log says why, if they could not be
copied or if a weight was written since.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from tensorstow.base.sizes import format_bytes
from tensorstow.checkpoint.content import has_bytes, options_of, unmanaged_tensors
from tensorstow.checkpoint.run import Extra
from tensorstow.checkpoint.serialize import extra_of, flatten
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups
from tensorstow.tensors.dtensor import Stamp, pager_of, shard_of, stamp_of

_MOST_BYTES = 16 << 20
"""Largest ``extra``, and largest sum of buffers, that is copied at each step."""
_SHARE, _FREE_SECONDS = 0.01, 1.0
"""Copies may take this share of the run's time, and these seconds more."""


@dataclass(frozen=True, slots=True)
class SmallValues:
    """The options of the groups, ``extra`` and buffers, all of one moment."""

    options: list[dict[str, Any]]
    extra: Any
    """As JSON, without its tensors."""
    tensors: list[torch.Tensor]
    """The tensors of ``extra``."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Copies, by name; the others are read from the module."""
    uncopied: list[tuple[torch.Tensor, Stamp]] = field(default_factory=list)
    """Tensors of the module that must not be written before the commit, as they were."""

    @classmethod
    def of_now(cls, groups: Groups, extra: object) -> "SmallValues":
        """Return the current values with ``extra``; nothing is copied."""
        plain, tensors = flatten(extra_of(extra), "extra")
        return cls(options_of(groups), plain, tensors)


class StepEnd:
    """The small values as the last step left them, if a commit of it may still follow."""

    def __init__(self, module: torch.nn.Module | None) -> None:
        """Begin without any step, for the buffers of ``module``."""
        self._module = module
        self.kept: SmallValues | None = None
        self._reason = "no step has ended"
        self._began = time.monotonic()
        self._spent = 0.0

    def forget(self, reason: str) -> None:
        """Drop the values; ``reason``: why a commit of the last step cannot be made."""
        self.kept, self._reason = None, reason

    def keep(self, params: ParamTable, groups: Groups, extra: Callable[[], Extra] | None) -> None:
        """Copy the values of the step that has just ended, with those of ``extra``, if cheap."""
        # First, in case extra() does not return.
        self.forget("extra() was interrupted or raised an error at the end of the last step")
        start = time.monotonic()
        if extra is not None and _has_several_processes():
            # One process must not call extra() alone: it may communicate.
            self.forget("extra() of several processes is called by scheduled commits alone")
        elif self._spent > _FREE_SECONDS + _SHARE * (start - self._began):
            self.forget("extra() takes too long to be called at the end of each step")
        else:
            self._copy(params, groups, {} if extra is None else extra())
            self._spent += time.monotonic() - start

    def _copy(self, params: ParamTable, groups: Groups, extra: object) -> None:
        values = SmallValues.of_now(groups, extra)
        nbytes = sum(tensor.nbytes for tensor in values.tensors)
        if nbytes > _MOST_BYTES:
            self.forget(f"extra() returns {format_bytes(nbytes)}, too much to copy at each step")
            return
        buffers, uncopied = _copies(self._module, params)
        self.kept = SmallValues(
            copy.deepcopy(values.options),
            values.extra,
            [tensor.detach().clone() for tensor in values.tensors],
            buffers,
            uncopied,
        )

    def why_not(self, params: ParamTable, groups: Groups) -> str | None:
        """Return why a commit of the last step cannot be made; None if it can."""
        if self.kept is None:
            return self._reason
        written = [p.written is not None and p.written_by_others for p in params.all()]
        if any(written) or any(_stamp(t) != before for t, before in self.kept.uncopied):
            return "weights or buffers were written after the last step"
        if len(self.kept.options) != len(groups):
            return "a parameter group was added after the last step"
        return None


def _copies(
    module: torch.nn.Module | None, params: ParamTable
) -> tuple[dict[str, torch.Tensor], list[tuple[torch.Tensor, Stamp]]]:
    """Return copies of the buffers, and the tensors that are not copied, with their stamps."""
    copies: dict[str, torch.Tensor] = {}
    # These have no stamp of our last update to be compared with.
    never_updated = (p.owner for p in params.all() if p.written is None)
    uncopied = [(tensor, _stamp(tensor)) for tensor in never_updated]
    room = _MOST_BYTES
    for name, tensor in unmanaged_tensors(module, (m.owner for m in params.all())):
        if not has_bytes(tensor):
            continue
        shard = shard_of(tensor).detach()
        # A frozen weight is not copied, whatever its size: its stamp shows whether it was written.
        if isinstance(tensor, torch.nn.Parameter) or shard.nbytes > room:
            uncopied.append((tensor, _stamp(tensor)))
        else:
            copies[name] = shard.clone()
            room -= shard.nbytes
    return copies, uncopied


def _stamp(tensor: torch.Tensor) -> Stamp:
    """Return version counters, and the address of a tensor that stays where it is."""
    shard = shard_of(tensor)
    if pager_of(tensor) is not None:
        return (tensor._version, shard._version)  # noqa: SLF001
    return stamp_of(shard, tensor)


def _has_several_processes() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
