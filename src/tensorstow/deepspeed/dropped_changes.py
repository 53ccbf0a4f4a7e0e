"""Finds writes to gathered parameters that are lost: those without a ``modifier_rank``."""

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.base.sizes import format_count
from tensorstow.deepspeed.config.values import say_once
from tensorstow.deepspeed.registry import RegisteredModel
from tensorstow.fsdp.sharding import host_group

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADVICE = "pass modifier_rank=, the rank whose changes are kept"
_Seen = tuple[int, int, int]


class DroppedChanges:
    """The parameters of one context that are to be as they were when it ends."""

    def __init__(self) -> None:
        """Watch nothing yet."""
        self._watched: dict[int, list[tuple[torch.Tensor, _Seen]]] = {}
        self._owner: RegisteredModel | None = None
        self._changed: list[torch.Tensor] = []

    def watch(self, owner: RegisteredModel, placed: torch.Tensor, captured: torch.Tensor) -> None:
        """Remember what a parameter is, which is whole now.

        ``captured`` is a variable's from before the model was placed, or the same.
        """
        self._owner = owner
        both = {id(p): p for p in (placed, captured)}.values()
        self._watched[id(placed)] = [(p, _seen(p)) for p in both]

    def note(self, placed: torch.Tensor) -> None:
        """Look whether a watched parameter, still whole, was written to."""
        if any(_seen(p) != before for p, before in self._watched.get(id(placed), ())):
            self._changed.append(placed)

    def tell(self) -> None:
        """Log once that changes were dropped; collective where that is an error.

        Raises OptionError on every rank, if the configuration asks for it and a rank has written.
        """
        if self._owner is None:
            return
        is_changed = bool(self._changed)
        group = host_group() if self._owner.checks_writes else None
        if group is not None:
            any_rank = torch.tensor(int(is_changed))
            dist.all_reduce(any_rank, dist.ReduceOp.MAX, group=group)
            is_changed = bool(any_rank)
        if not is_changed:
            return
        names = {id(p): name for name, p in self._owner.module.named_parameters()}
        first = names.get(id(self._changed[0])) if self._changed else None
        writer = "by another rank" if first is None else f"to {first}"
        message = (
            f"{format_count(max(1, len(self._changed)), 'parameter')} (written {writer}) changed"
            f" inside of GatheredParameters without a modifier_rank, and changes were dropped:"
            f" {_ADVICE}."
        )
        if self._owner.checks_writes:
            raise OptionError(message)
        say_once(message)


def _seen(parameter: torch.Tensor) -> _Seen:
    """Return what a write changes: where the elements are, their version, or their sum of bits.

    A write to ``.data`` counts no version.
    """
    values = parameter.detach()
    integers = values.reshape(-1).view(_INTEGERS[values.element_size()])
    return parameter.data_ptr(), parameter._version, int(integers.sum(dtype=torch.int64))  # noqa: SLF001
