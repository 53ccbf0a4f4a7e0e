"""Lightning with a model that ``tensorstow.stow`` places in ``configure_optimizers``.

[Note: In Lightning] An optimizer alone needs none of this. A placed model must not be moved,
wrapped, cast or gathered, which every strategy of Lightning's does at some point. Ranks are
Lightning's (``devices=``, torchrun), and their gradients are reduced by what ``stow`` made. A
checkpoint whose optimizer state is a snapshot reference has no weights of the placed model: they
are in the snapshot. The snapshot is dropped when Lightning removes or replaces the checkpoint, if
no other checkpoint is known to name it: from what this process has saved, or from the files in the
folders of checkpoints, if these can be read without running code. An unreadable file may name any
snapshot of an earlier process.
"""

import logging
from collections.abc import Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import launched
from tensorstow.base.signals import StopSignals, read_stop_signals
from tensorstow.checkpoint.snapshot_reference import is_own, is_reference, new_name, read_reference
from tensorstow.checkpoint.torch_file import load_torch_file
from tensorstow.doorkit.stop_point import StopPoint
from tensorstow.fsdp.stow import plan_of

logger = logging.getLogger("tensorstow")

_STATES = "optimizer_states"


class StowStrategy(ModelParallelStrategy):
    """``Trainer(strategy=StowStrategy())``: ``configure_optimizers`` calls ``tensorstow.stow``."""

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)
        self._launch = launched()  # Lightning sets WORLD_SIZE itself, without RANK, when it starts
        self._snapshots: dict[Path, list[str | None] | None] = {}
        """Snapshots by checkpoint, an entry for each optimizer; None if it cannot be read."""
        self._made: set[str] = set()
        """Snapshots that this process has made."""
        self._checkpoint_callbacks: list[Any] = []

    def setup_environment(self) -> None:
        """Join the ranks; each has its own batches.

        Raises:
            OptionError: The launcher started another number of ranks.
        """
        launch, world = self._launch, self.num_nodes * self.num_processes
        if launch.rank is not None and launch.world not in {1, world}:
            message = (
                f"The Trainer was given num_nodes={self.num_nodes} and devices="
                f"{self.num_processes}, but by {launch.source} there are {launch.world} ranks. Give"
                " it as many, or start one process."
            )
            raise OptionError(message)
        # "auto" would make the ranks of a machine one tensor-parallel group, with the same batches.
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def setup(self, trainer: Any) -> None:  # Lightning's
        """Place the model and make its optimizer; nothing else is moved or cast.

        Raises:
            OptionError: Mixed precision, or weights that ``stow`` did not place.
        """
        module: Any = self.lightning_module
        self._checkpoint_callbacks = trainer.checkpoint_callbacks
        self.accelerator.setup(trainer)  # type: ignore[union-attr]  # set by now
        _refuse_precision(self.precision_plugin.precision)
        self.precision_plugin = _ClipsInside()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            _refuse_unplaced(module)
        elif not _placed(module):
            self.model_to_device()
        self.setup_precision_plugin()

    # --- checkpoints ---

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Return True: the optimizer takes its states from the checkpoint, or from a reference."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the module; with several ranks, this rank's shards."""
        state: dict[str, Any] = self.lightning_module.state_dict()  # type: ignore[union-attr]
        return state

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state dict; each of several ranks takes the same snapshot."""
        real = getattr(optimizer, "_optimizer", optimizer)
        policy = getattr(real, "offload_policy", None)  # StowedOptimizer has none, and no commits
        is_durable = policy is not None and policy.placement.durable
        earlier_names = _names_of(real) if is_durable else set()
        if self.world_size > 1 and is_durable:
            step = self.lightning_module.global_step  # type: ignore[union-attr]
            real.snapshot(self.broadcast(new_name(step)))
        state: dict[str, Any] = real.state_dict()
        self._made |= _names_of(real) - earlier_names if is_durable else set()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint, without the placed weights: they are in its snapshots.

        Those that a file with this name had alone are dropped.

        Raises:
            OptionError: The checkpoint has no reference.
        """
        if not _has_references(checkpoint):
            _refuse_weights()
        before = tuple(f"{name}." if name else "" for name in _placed(self.lightning_module))
        state = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {n: v for n, v in state if not n.startswith(before)}
        path, names = Path(filepath).absolute(), _snapshots_in(checkpoint)
        replaces = self.is_global_zero and path.exists()
        replaced_names = self._unshared(path) if replaces else []
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)
        self._snapshots[path] = names
        # After the new file is written: until then the old one needs its snapshots.
        self._drop([None if name in names else name for name in replaced_names])

    def refuse_whole_checkpoints(self) -> None:
        """Refuse, before a run begins, what ``save_checkpoint`` would at a signal.

        Raises:
            OptionError: Checkpoints would have the weights of a placed model.
        """
        optimizers: Any = [getattr(o, "_optimizer", o) for o in self.optimizers]
        runtimes = [getattr(optimizer, "_runtime", None) for optimizer in optimizers]
        if not all(getattr(runtime, "saves_references", False) for runtime in runtimes):
            _refuse_weights()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Return the contents of a checkpoint; nothing is loaded yet."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a checkpoint into the module; placed weights come with the reference instead."""
        module: Any = self.lightning_module
        module.load_state_dict(checkpoint["state_dict"], strict and not _has_references(checkpoint))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, or go on from their snapshot references."""
        Strategy.load_optimizer_state_dict(self, checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, and the snapshots that its snapshot references alone name."""
        names = self._unshared(Path(filepath).absolute()) if self.is_global_zero else []
        # First: a checkpoint that outlives its snapshots cannot be loaded.
        try:
            super().remove_checkpoint(filepath)
        except BaseException:
            self._drop([])  # the other ranks wait for the names
            raise
        self._drop(names)

    def _drop(self, names: list[str | None]) -> None:
        """Drop a snapshot of each optimizer; None: of that one, none; rank 0's names count."""
        for optimizer, name in zip(self.optimizers, self.broadcast(names), strict=False):
            real: Any = getattr(optimizer, "_optimizer", optimizer)
            if name is not None and is_own(name) and name in _names_of(real):
                real.drop(name)

    def _unshared(self, path: Path) -> list[str | None]:
        """Return the snapshots that a checkpoint alone names; None for others."""
        places = [c.dirpath for c in self._checkpoint_callbacks if c.dirpath is not None]
        folders = {path.parent, *map(Path, places)}
        for folder in folders:
            self._read_snapshots(folder, path.suffix)
        names = self._snapshots.pop(path, None) or []
        per_folder = self._snapshots.values()
        needed_names = {name for snapshots in per_folder for name in snapshots or ()}
        are_all_known = None not in per_folder and all(folder.is_dir() for folder in folders)
        return [
            name if name not in needed_names and (are_all_known or name in self._made) else None
            for name in names
        ]

    def _read_snapshots(self, folder: Path, suffix: str) -> None:
        """Read the references of checkpoints that are not known yet, as of an earlier process."""
        for entry in sorted(folder.glob(f"*{suffix}")):
            path = entry.resolve() if entry.is_symlink() else entry
            if path in self._snapshots or not path.exists():
                continue
            try:
                self._snapshots[path] = _snapshots_in(load_torch_file(path, maps=True))
            except Exception as error:  # noqa: BLE001  # torch raises errors of many kinds
                self._snapshots[path] = None
                logger.warning(
                    "%s cannot be read without running code that it may name: it may need any"
                    " snapshot of an earlier process, so these are kept. optimizer.snapshots()"
                    " lists them, optimizer.drop(name) frees their disk space (%s: %s)",
                    *(path, type(error).__name__, str(error).partition("\n")[0]),
                )


class StopCheckpoint(OnExceptionCheckpoint):
    """``Trainer(callbacks=[..., StopCheckpoint(folder)])``: at a signal, save a checkpoint and end.

    After the batch of the next step, all ranks save the checkpoint and raise SystemExit, whichever
    got the signal. ``fit(..., ckpt_path="last")`` goes on from it, or from a newer one that
    ModelCheckpoint calls its last. A training that ends removes it. Pass it after ModelCheckpoint,
    which then saves first. After the last batch of an epoch, validation and what else ends the
    epoch come first.

    Lightning's handlers of these signals are replaced during training: on several ranks its own
    for SIGTERM communicates inside the handler, amid other collectives.

    Args:
        dirpath: The folder of the checkpoint.
        filename: The file's name without ".ckpt".
        stop_signals: The name of a signal, or a dict of exit statuses by names, as in ``AdamW``.
            Python handles signals in the main thread alone.
    """

    def __init__(
        self,
        dirpath: str | PathLike[str],
        filename: str = "stopped",
        *,
        stop_signals: StopSignals = "SIGTERM",
    ) -> None:
        super().__init__(str(dirpath), filename)
        read_stop_signals(stop_signals)
        self._stop_signals = stop_signals
        self._stop_point = StopPoint()
        self._global_step = 0
        """The trainer's at the last look."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        """Handle the signals, in place of the trainer, which has just begun to.

        Raises:
            OptionError: Checkpoints would have the weights of a placed model.
        """
        if isinstance(trainer.strategy, StowStrategy):
            trainer.strategy.refuse_whole_checkpoints()
        self._global_step = trainer.global_step
        self._close()
        self._stop_point = StopPoint(
            self._stop_signals, partial(trainer.save_checkpoint, self.ckpt_path)
        )

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """End the run after a step; in the last batch of an epoch, leave it to the epoch's end."""
        if trainer.global_step != self._global_step:
            self._global_step = trainer.global_step
            self._stop_point.note_step()
        if not trainer.is_last_batch:
            self._stop_point.reach()

    def on_train_epoch_end(self, *_: Any) -> None:
        """End the run after an epoch."""
        self._stop_point.reach()

    def on_train_end(self, *_: Any) -> None:
        """Restore the handlers that were there."""
        self._close()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Restore the handlers that were there; an error saves nothing."""
        self._close()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Remove the checkpoint of an earlier stop when training is complete.

        Args:
            trainer, pl_module, stage: Lightning's.
        """
        del pl_module
        if stage == "fit" and not trainer.fast_dev_run:  # which tries a few batches
            trainer.strategy.remove_checkpoint(self.ckpt_path)

    def _close(self) -> None:
        self._stop_point.close()
        self._stop_point = StopPoint()


class _ClipsInside(Precision):
    """Clips gradients inside the update, on any tier."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        optimizer.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:  # noqa: ARG002
        message = (
            f'gradient_clip_algorithm="value" was given with gradient_clip_val={clip_val}:'
            ' gradients are clipped inside the update, by their norm. Use "norm".'
        )
        raise OptionError(message)


def _snapshots_in(checkpoint: Mapping[str, Any]) -> list[str | None]:
    """Return the snapshot that each optimizer's reference names; None: it has no reference."""
    states = checkpoint.get(_STATES, ())
    return [read_reference(state).snapshot if is_reference(state) else None for state in states]


def _names_of(optimizer: Any) -> set[str]:
    """Return the names of an optimizer's snapshots."""
    return {name for summary in optimizer.snapshots() for name in summary.names}


def _has_references(checkpoint: Mapping[str, Any]) -> bool:
    states = checkpoint.get(_STATES, ())
    return bool(states) and all(is_reference(state) for state in states)


def _placed(module: Any, name: str = "") -> list[str]:
    """Return the names of the modules that ``stow`` has placed."""
    try:
        plan_of(module)
    except OptionError:
        return []
    parts = module.named_children()
    nested = [
        _placed(part, f"{name}.{child_name}" if name else child_name) for child_name, part in parts
    ]
    return [module_name for names in nested for module_name in names] or [name]


def _refuse_weights() -> NoReturn:
    message = (
        "A checkpoint was to be written with the weights of a placed model in it, which would be in"
        ' memory whole. Give stow dir= and its optimizer checkpoints="reference", and leave'
        " save_weights_only out; or enable_checkpointing=False. tensorstow.save_safetensors(model,"
        " folder) writes the weights."
    )
    raise OptionError(message)


def _refuse_precision(precision: str) -> None:
    if precision != "32-true":
        message = (
            f'precision="{precision}" was given to the Trainer, and its model is placed:'
            " torch.autocast keeps a 16-bit copy of every weight until forward ends, so that the"
            " whole model would be in memory. Leave it out, and give stow compute_dtype=."
        )
        raise OptionError(message)


def _refuse_unplaced(module: nn.Module) -> None:
    """Raise OptionError for a trained weight in no placed module: ranks would differ in it."""
    placed = _placed(module)
    before = tuple(f"{name}." if name else "" for name in placed)
    rest = [n for n, p in module.named_parameters() if p.requires_grad]
    rest = [n for n in rest if not placed or not n.startswith(before)]
    if rest:
        message = (
            f"StowStrategy was given a module with {rest[0]} and {len(rest) - 1} more parameters"
            " that stow() did not place: call tensorstow.stow for the model in"
            " configure_optimizers, and return its optimizer. An optimizer alone needs no strategy."
        )
        raise OptionError(message)
