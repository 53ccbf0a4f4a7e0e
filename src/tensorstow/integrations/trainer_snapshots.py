"""Snapshots of a Trainer's checkpoints: named on all ranks, and dropped with their checkpoints."""

import logging
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import transformers
from accelerate.utils import broadcast_object_list

from tensorstow.checkpoint.ticket import is_own, is_ticket, new_name, snapshot_named_by
from tensorstow.optim.stowed_adam import StowedAdam

logger = logging.getLogger("tensorstow")

_OPTIMIZER = "optimizer.pt"
_LARGEST_TICKET = 1 << 20
"""In bytes; what is larger has states."""


class DropSnapshots(transformers.TrainerCallback):
    """Drops the snapshots of checkpoints that ``save_total_limit`` has removed."""

    def __init__(self) -> None:
        """Begin without knowing of any checkpoint."""
        self._known: set[str] = set()

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: object,  # noqa: ARG002  # the callback's signature
        control: object,  # noqa: ARG002
        **_: object,
    ) -> None:
        """Note the snapshots that the checkpoints name.

        Args:
            args: With the folder of the checkpoints.
            state: Of the Trainer.
            control: Of the Trainer.
            **_: What else a Trainer tells.
        """
        self._known = _seen_by_first(args)

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: object,  # noqa: ARG002
        control: object,  # noqa: ARG002
        **told: Any,  # noqa: ANN401
    ) -> None:
        """Drop the snapshots whose checkpoints are gone since they were seen last.

        Args:
            args: With the folder of the checkpoints.
            state: Of the Trainer.
            control: Of the Trainer.
            **told: What else a Trainer tells: the optimizer.
        """
        optimizer = getattr(told["optimizer"], "optimizer", told["optimizer"])
        there = _seen_by_first(args)
        kept = {name for summary in optimizer.snapshots() for name in summary.names}
        gone = sorted((self._known - there) & kept)
        for name in broadcast_object_list([gone])[0]:
            optimizer.drop(name)
        self._known = there


def snapshot_of(checkpoint: Path) -> str | None:
    """Return the snapshot that the ticket in a checkpoint names; None if it has none."""
    path = checkpoint / _OPTIMIZER
    if not path.is_file() or path.stat().st_size > _LARGEST_TICKET:
        return None
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, UnpicklingError) as error:
        # Of a run that was killed while it wrote; whoever loads this checkpoint is told.
        logger.warning("%s cannot be read, and no snapshot is dropped for it: %s", path, error)
        return None
    return snapshot_named_by(saved) if is_ticket(saved) else None


def take_snapshot(optimizer: StowedAdam, step: int) -> None:
    """Name the current state on every rank: a ticket, which one rank asks for, then names it."""
    optimizer.snapshot(broadcast_object_list([new_name(step)])[0])


def _seen_by_first(args: transformers.TrainingArguments) -> set[str]:
    """Return the snapshots that checkpoints name; of rank 0, which removes checkpoints, alone."""
    return _named_below(Path(str(args.output_dir))) if args.process_index == 0 else set()


def _named_below(folder: Path) -> set[str]:
    """Return the snapshots that the tickets of the checkpoints in a folder name."""
    named = (snapshot_of(path.parent) for path in folder.glob(f"checkpoint-*/{_OPTIMIZER}"))
    return {name for name in named if name is not None and is_own(name)}
