"""Snapshots of a Trainer's checkpoints: named on all ranks, and dropped with their checkpoints.

[Note: Dropped snapshots] A snapshot holds the states of its checkpoint, and cannot be brought back.
``DropSnapshots`` drops it only if this run knows which checkpoint it belongs to, and the Trainer
has removed that checkpoint for ``save_total_limit``: while the Trainer saved another, its folder
existed and was one of the oldest that exceeded the limit, and it is gone after that. Any other
folder that disappears was moved, perhaps to be kept. A snapshot that a copy of the checkpoint names
too is kept. A reference that cannot be read may name any snapshot of an earlier process, so these
are kept while its checkpoint exists.
"""

import logging
import re
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from accelerate.utils import broadcast_object_list
from torch.utils.hooks import RemovableHandle

from tensorstow.base.errors import DamageError, StowError
from tensorstow.checkpoint.snapshot_reference import (
    SnapshotReference,
    is_own,
    is_reference,
    new_name,
    read_reference,
)
from tensorstow.checkpoint.torch_file import load_torch_file
from tensorstow.optim.stowed_adam import StowedAdam

logger = logging.getLogger("tensorstow")

_OPTIMIZER = "optimizer.pt"
_LARGEST_REFERENCE = 1 << 20
"""Size in bytes; a larger file holds states."""


class DropSnapshots(transformers.TrainerCallback):
    """Drops the snapshots of checkpoints that ``save_total_limit`` has removed."""

    def __init__(self) -> None:
        self._snapshots: dict[Path, str] = {}
        """Snapshots by checkpoint; filled on rank 0 only, which removes checkpoints."""
        self._moved: set[str] = set()
        """Snapshots of checkpoints that were moved."""
        self._earlier: set[str] = set()
        """Snapshots that checkpoints of earlier processes name."""
        self._unread: set[Path] = set()
        """Checkpoints whose snapshot references cannot be read."""
        self._order: list[Path] = []
        """Checkpoints in the order in which the Trainer removes them, as of the current save."""
        self._save_hook: RemovableHandle | None = None

    def on_train_begin(
        self,
        args: transformers.TrainingArguments,
        state: object,  # noqa: ARG002  # the callback's signature
        control: object,  # noqa: ARG002
        **trainer_values: Any,
    ) -> None:
        """Record the snapshots that the checkpoints name."""
        self._snapshots.clear()
        self._unread.clear()
        self._note_checkpoints(args)
        self._earlier = set(self._snapshots.values())
        if self._save_hook is not None:
            self._save_hook.remove()
        # A save asks for the state dict after it has made its folder and before it removes others:
        # no callback of the user's runs in between.
        optimizer = _inner(trainer_values["optimizer"])
        self._save_hook = optimizer.register_state_dict_pre_hook(partial(self._note_order, args))

    def on_save(
        self,
        args: transformers.TrainingArguments,
        state: transformers.TrainerState,
        control: object,  # noqa: ARG002
        **trainer_values: Any,
    ) -> None:
        """Drop the snapshots whose checkpoints the Trainer has just removed."""
        optimizer = _inner(trainer_values["optimizer"])
        # First: copies of a checkpoint that is gone name its snapshot, too.
        self._note_checkpoints(args)
        gone = [folder for folder in self._snapshots if not folder.is_dir()]
        names = {folder: self._snapshots.pop(folder) for folder in sorted(gone)}
        removed = self._removed(args, state)
        for folder, name in names.items():
            if folder not in removed:
                self._moved.add(name)
                logger.warning(
                    "%s is gone, and the Trainer did not remove it: snapshot %s, which has its"
                    " states, is kept. optimizer.drop(%r) frees the disk space",
                    *(folder, name, name),
                )
        kept_names = {name for summary in optimizer.snapshots() for name in summary.names}
        self._unread -= {folder for folder in removed if not folder.is_dir()}
        needed_names = self._moved.union(self._snapshots.values())  # copies name the same snapshot
        needed_names |= self._earlier if self._unread else set()
        unneeded_names = kept_names.intersection(names.values()) - needed_names
        for name in broadcast_object_list([sorted(unneeded_names)])[0]:
            optimizer.drop(name)

    def _note_order(self, args: transformers.TrainingArguments, _: object) -> None:
        self._order = _in_order(Path(str(args.output_dir)))

    def _removed(
        self, args: transformers.TrainingArguments, state: transformers.TrainerState
    ) -> set[Path]:
        """Return the checkpoints that the save which is complete now had to remove."""
        order, self._order = self._order, []
        limit = args.save_total_limit
        new = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if limit is None or limit <= 0 or new not in order:  # not noted during this save
            return set()
        protected = {new, *map(Path, filter(None, [state.best_model_checkpoint]))}
        # As the Trainer, which keeps the new checkpoint and the best one whatever the limit.
        excess = max(0, len(order) - max(limit, len(protected)))
        return set([folder for folder in order if folder not in protected][:excess])

    def _note_checkpoints(self, args: transformers.TrainingArguments) -> None:
        """Read the snapshot references of checkpoints that are not known yet."""
        if args.process_index != 0:
            return
        for path in sorted(Path(str(args.output_dir)).glob(f"checkpoint-*/{_OPTIMIZER}")):
            if path.parent in self._snapshots:
                continue
            try:
                reference = reference_in(path.parent)
            except StowError as error:
                logger.warning("%s Its snapshot is kept, also if the checkpoint is removed", error)
                self._unread.add(path.parent)
                continue
            self._unread.discard(path.parent)
            if (
                reference is not None
                and reference.snapshot is not None
                and is_own(reference.snapshot)
            ):
                self._snapshots[path.parent] = reference.snapshot


def _in_order(output_dir: Path) -> list[Path]:
    """Return the checkpoints as the Trainer sorts them: by time, or by step within a second."""
    folders = [folder for folder in output_dir.glob("checkpoint-*") if folder.is_dir()]
    times = {folder: folder.stat().st_mtime for folder in folders}
    if folders and max(times.values()) - min(times.values()) >= 1:
        return sorted(folders, key=lambda folder: (times[folder], str(folder)))
    steps = {f: int(m[1]) for f in folders if (m := re.match(r"checkpoint-(\d+)", f.name))}
    return sorted(steps, key=lambda folder: (steps[folder], str(folder)))


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def reference_in(checkpoint: Path) -> SnapshotReference | None:
    """Return the reference of a checkpoint; None if it has none.

    Raises DamageError if the file of the optimizer cannot be read, or is not what was saved.
    """
    path = checkpoint / _OPTIMIZER
    if not path.is_file() or path.stat().st_size > _LARGEST_REFERENCE:
        return None
    try:
        saved = load_torch_file(path)
    except Exception as error:  # torch raises errors of many kinds for a damaged file
        message = (
            f"{path} was to be read, and is damaged ({type(error).__name__}: {error}), as by a kill"
            " while it was written: take another checkpoint."
        )
        raise DamageError(message) from error
    return read_reference(saved) if is_reference(saved) else None


def take_snapshot(optimizer: StowedAdam, step: int) -> None:
    """Take one named snapshot on every rank; the reference that one rank saves names it, too."""
    optimizer.snapshot(broadcast_object_list([new_name(step)])[0])
