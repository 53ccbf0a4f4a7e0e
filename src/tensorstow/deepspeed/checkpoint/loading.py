"""Opens a checkpoint, of this engine or of DeepSpeed's own."""

from pathlib import Path
from typing import Any

from torch import nn

from tensorstow.checkpoint.serialize import inflate
from tensorstow.deepspeed.checkpoint.sharded import (
    LATEST,
    LATEST_UNIVERSAL,
    latest_tag,
    load_module,
    load_states,
    read_common,
)
from tensorstow.deepspeed.checkpoint.zero_checkpoint import ZeroCheckpoint
from tensorstow.fsdp.sharding import verify_together
from tensorstow.optim.placed import PlacedOptimizer

COUNTS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


class ShardedCheckpoint:
    """A folder that this engine's ``save_checkpoint`` wrote."""

    def __init__(self, folder: Path) -> None:
        """Verify the files, and read what is the same on every rank; collective.

        Raises StoreFormatError if there is no checkpoint, DamageError if it is damaged.
        """
        self._folder = folder
        self._common = read_common(folder, verify_together)
        self.counts: dict[str, int] = {name: self._common[name] for name in COUNTS}
        self.scale: dict[str, Any] | None = self._common["scale"]
        self.scheduler: Any = self._common["scheduler"]

    @property
    def client_state(self) -> dict[str, Any]:
        """The ``client_state`` of ``save_checkpoint``."""
        plain, tensors = self._common["client_state"]
        state: dict[str, Any] = inflate(plain, tensors.__getitem__)
        return state

    def load_module(self, module: nn.Module, *, strict: bool) -> None:
        """Load weights and buffers; collective."""
        load_module(self._folder, module, strict=strict)

    def load_states(self, module: nn.Module, optimizer: PlacedOptimizer) -> None:
        """Load states and hyper-parameters; collective."""
        load_states(self._folder, self._common, module, optimizer)


def open_checkpoint(folder: Path) -> ShardedCheckpoint | ZeroCheckpoint:
    """Return the checkpoint in ``folder``; raises StoreFormatError if there is none."""
    return ZeroCheckpoint(folder) if ZeroCheckpoint.is_at(folder) else ShardedCheckpoint(folder)


def tag_to_load(directory: Path, *, universal: bool) -> str | None:
    """Return DeepSpeed's default tag; None if nothing was saved."""
    return latest_tag(directory, LATEST_UNIVERSAL if universal else LATEST)
