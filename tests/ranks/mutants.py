"""Breaks of the engine, each of which parity must notice."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from ranks.stowed import RunConfig, stowed
from tensorstow.checkpoint import resume
from tensorstow.fsdp import sharding
from tensorstow.fsdp.gradient_offload import HostGradient
from tensorstow.fsdp.shard_storage import ShardStorage
from tensorstow.fsdp.unshard import MicroBatches
from tensorstow.step import norms
from tensorstow.step.disk_feed import UnitPins

Mutant = Callable[[ExitStack], None]


def narrow_sums(patches: ExitStack) -> None:
    """Sum micro-batches in the gradient's own dtype."""

    def accumulate(self: HostGradient, other: torch.Tensor, alpha: float = 1.0) -> None:
        self.elements.add_(other, alpha=alpha)

    patches.enter_context(patch.object(HostGradient, "accumulate", accumulate))


def last_micro_batch(patches: ExitStack) -> None:
    """Take the last micro-batch for the sum."""

    def accumulate(self: HostGradient, other: torch.Tensor, alpha: float = 1.0) -> None:
        self.elements.copy_(other.mul(alpha))

    patches.enter_context(patch.object(HostGradient, "accumulate", accumulate))


def own_norm(patches: ExitStack) -> None:
    """Clip by the norm of this rank's shards alone."""

    def alone(_: object, parts: list[float]) -> list[float]:
        return list(parts)

    patches.enter_context(patch.object(norms, "sum_over_shards", alone))


def old_weights(patches: ExitStack) -> None:
    """Gather a weight without waiting for its update."""
    before = ShardStorage.pin

    def pin_old(self: ShardStorage) -> torch.Tensor:
        if not hasattr(self, "first"):
            self.first = before(self).clone()
        return self.first

    patches.enter_context(patch.object(ShardStorage, "pin", pin_old))


def unwritten(patches: ExitStack) -> None:
    """Forget what an update did to a weight on disk."""

    def forget(self: UnitPins, key: int) -> None:
        pager: Any = self._pins.pop(key).pager
        pager.unpin()
        pager.drop_pages()

    patches.enter_context(patch.object(UnitPins, "_unpin", forget))


def unreduced(patches: ExitStack) -> None:
    """Reduce every micro-batch of stage 1 but the last."""

    def before_forward(self: MicroBatches, *_: object) -> None:
        self._seen = (self._seen + 1) % self._steps
        self._set_last(self._seen != 0)

    patches.enter_context(patch.object(MicroBatches, "_pre_forward", before_forward))


def other_rows(patches: ExitStack) -> None:
    """Cut rows as if there were one rank more."""
    right = sharding.Sharding.rows

    def rows(self: sharding.Sharding, shape: torch.Size) -> tuple[int, int, int]:
        start, stop, length = right(self, shape)
        moved = min(start + 1, shape[0] - (stop - start))
        return moved, moved + stop - start, length

    patches.enter_context(patch.object(sharding.Sharding, "rows", rows))


def thawed(patches: ExitStack) -> None:
    """Train what is frozen."""
    right = sharding.replace_parameter

    def replace_parameter(root: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
        right(root, old, new.requires_grad_())

    patches.enter_context(patch.object(sharding, "replace_parameter", replace_parameter))


def frozen_not_resumed(patches: ExitStack) -> None:
    """Leave weights that nobody trains out of what a commit brings back."""
    patches.enter_context(patch.object(resume, "_load_module", lambda *_: None))


def weights_not_resumed(patches: ExitStack) -> None:
    """Leave weights as they are when a run goes on."""
    patches.enter_context(patch.object(resume, "_load_weights", lambda *_: None))


MUTANTS: dict[str, Mutant] = {
    f.__name__: f
    for f in (
        narrow_sums,
        last_micro_batch,
        own_norm,
        old_weights,
        unwritten,
        unreduced,
        other_rows,
        thawed,
        frozen_not_resumed,
        weights_not_resumed,
    )
}


def mutated(config: RunConfig, name: str, directory: Path) -> list[torch.Tensor] | str:
    """Train with one break; return weights, or what was raised."""
    with ExitStack() as patches:
        MUTANTS[name](patches)
        try:
            return stowed(config, directory)
        except (AttributeError, NameError, TypeError):
            raise  # the break itself is broken: it names what is not there
        except Exception as error:  # noqa: BLE001  # an error is noticed too
            return f"{type(error).__name__}: {error}"
