"""Opens a checkpoint, of this engine or of DeepSpeed's own."""

from pathlib import Path
from typing import Any

from torch import nn

from tensorstow.checkpoint.serialize import inflate
from tensorstow.deepspeed.checkpoint.sharded import (
    latest_tag,
    load_module,
    load_states,
    read_common,
)
from tensorstow.deepspeed.checkpoint.zero_checkpoint import ZeroCheckpoint
from tensorstow.optim.placed import PlacedOptimizer

COUNTS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")


class ShardedCheckpoint:
    """A folder that this engine's ``save_checkpoint`` wrote."""

    def __init__(self, folder: Path) -> None:
        """Read what is the same on every rank; raises StoreFormatError if it is not there."""
        self._folder = folder
        self._common = read_common(folder)
        self.counts: dict[str, int] = {name: self._common[name] for name in COUNTS}
        self.scale: dict[str, Any] | None = self._common["scale"]
        self.scheduler: Any = self._common["scheduler"]

    @property
    def client_state(self) -> dict[str, Any]:
        """What was given to ``save_checkpoint``."""
        plain, tensors = self._common["client_state"]
        given: dict[str, Any] = inflate(plain, tensors.__getitem__)
        return given

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
    """Return the tag that DeepSpeed takes where none is given; None if nothing was saved."""
    if not universal:
        return latest_tag(directory)
    file = directory / "latest_universal"
    return file.read_text().strip() if file.is_file() else None
