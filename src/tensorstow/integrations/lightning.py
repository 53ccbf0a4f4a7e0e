"""Lightning with a model that ``tensorstow.stow`` places in ``configure_optimizers``.

[Note: In Lightning] An optimizer alone needs nothing of this. A placed model must not be moved,
wrapped, cast or gathered, which every strategy of Lightning's does at some point. Ranks are
Lightning's (``devices=``, torchrun), and their gradients are reduced by what ``stow`` made. A
checkpoint whose optimizer state is a ticket has no weights of the placed model: they are in the
snapshot that it names.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.ticket import is_own, is_ticket, new_name, snapshot_named_by
from tensorstow.fsdp.stow import plan_of

_STATES = "optimizer_states"


class StowStrategy(ModelParallelStrategy):
    """``Trainer(strategy=StowStrategy())``: ``configure_optimizers`` calls ``tensorstow.stow``."""

    def __init__(self) -> None:
        """Leave everything to ``configure_optimizers``."""
        super().__init__(save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Join the ranks, which all have batches of their own."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        self._tensor_parallel_size = 1
        super().setup_environment()

    def setup(self, trainer: Any) -> None:  # noqa: ANN401  # Lightning's
        """Have the model placed and its optimizer made; nothing is moved or cast.

        Args:
            trainer: Of Lightning.

        Raises:
            OptionError: Mixed precision, or weights that ``stow`` was not given.
        """
        module: Any = self.lightning_module
        self.accelerator.setup(trainer)  # type: ignore[union-attr]  # it is there by now
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
        """Return True: the optimizer takes its states from the checkpoint, or from a ticket."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict of the module; of several ranks each has its shards.

        Returns:
            Tensors by name.
        """
        found: dict[str, Any] = self.lightning_module.state_dict()  # type: ignore[union-attr]
        return found

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return an optimizer's state dict; for a ticket of several ranks each names its snapshot.

        Args:
            optimizer: Of the module.

        Returns:
            The state dict.
        """
        real = getattr(optimizer, "_optimizer", optimizer)
        policy = getattr(real, "offload_policy", None)  # StowedOptimizer has none, and no commits
        if self.world_size > 1 and policy is not None and policy.placement.durable:
            step = self.lightning_module.global_step  # type: ignore[union-attr]
            real.snapshot(self.broadcast(new_name(step)))
        found: dict[str, Any] = real.state_dict()
        return found

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,  # noqa: ANN401
        storage_options: Any = None,  # noqa: ANN401
    ) -> None:
        """Write a checkpoint, without the placed weights: they are in its tickets' snapshots.

        Args:
            checkpoint: Of the Trainer.
            filepath: The file.
            storage_options: Of Lightning.

        Raises:
            OptionError: It has no ticket.
        """
        if not _has_tickets(checkpoint):
            message = (
                "A checkpoint was to be written with the weights of a placed model in it, which"
                ' would be in memory whole. Give stow dir= and its optimizer checkpoints="ticket",'
                " and leave save_weights_only out; or enable_checkpointing=False."
                " tensorstow.save_safetensors(model, folder) writes the weights."
            )
            raise OptionError(message)
        before = tuple(f"{name}." if name else "" for name in _placed(self.lightning_module))
        state = checkpoint["state_dict"].items()
        checkpoint["state_dict"] = {n: v for n, v in state if not n.startswith(before)}
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(
        self,
        checkpoint_path: Any,  # noqa: ANN401
        weights_only: bool | None = None,  # noqa: FBT001
    ) -> Any:  # noqa: ANN401
        """Return what is in a checkpoint; nothing is loaded yet.

        Args:
            checkpoint_path: The file.
            weights_only: As of ``torch.load``.

        Returns:
            What ``save_checkpoint`` was given.
        """
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:  # noqa: FBT001, FBT002
        """Load what a checkpoint has of the module; the placed weights of a ticket come with it.

        Args:
            checkpoint: The checkpoint.
            strict: Whether the names must be the module's.
        """
        module: Any = self.lightning_module
        module.load_state_dict(checkpoint["state_dict"], strict and not _has_tickets(checkpoint))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, or go on from their tickets.

        Args:
            checkpoint: The checkpoint.
        """
        Strategy.load_optimizer_state_dict(self, checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:  # noqa: ANN401
        """Remove a checkpoint, and the snapshots of its tickets.

        Args:
            filepath: The file.
        """
        names: list[str | None] = []
        if self.is_global_zero:
            with suppress(FileNotFoundError):  # of a run before, which Lightning takes for done
                saved = self.checkpoint_io.load_checkpoint(filepath, weights_only=False)
                states = saved.get(_STATES, ())
                names = [snapshot_named_by(s) if is_ticket(s) else None for s in states]
        for optimizer, name in zip(self.optimizers, self.broadcast(names), strict=False):
            real: Any = getattr(optimizer, "_optimizer", optimizer)
            kept = {n for summary in real.snapshots() for n in summary.names} if name else set()
            if name is not None and name in kept and is_own(name):
                real.drop(name)
        super().remove_checkpoint(filepath)


class _ClipsInside(Precision):
    """Clips gradients inside the update, wherever they are by then."""

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:  # noqa: ANN401
        optimizer.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:  # noqa: ANN401, ARG002
        message = (
            f'gradient_clip_algorithm="value" was given with gradient_clip_val={clip_val}:'
            ' gradients are clipped inside the update, by their norm. Use "norm".'
        )
        raise OptionError(message)


def _has_tickets(checkpoint: Mapping[str, Any]) -> bool:
    states = checkpoint.get(_STATES, ())
    return bool(states) and all(is_ticket(state) for state in states)


def _placed(module: Any, name: str = "") -> list[str]:  # noqa: ANN401
    """Return the names of the modules that ``stow`` has placed."""
    try:
        plan_of(module)
    except OptionError:
        return []
    parts = module.named_children()
    below = [_placed(part, f"{name}.{own}" if name else own) for own, part in parts]
    return [found for one in below for found in one] or [name]


def _refuse_precision(precision: str) -> None:
    if precision != "32-true":
        message = (
            f'precision="{precision}" was given to the Trainer, and its model is placed:'
            " torch.autocast keeps a 16-bit copy of every weight until forward ends, so that the"
            " whole model would be in memory. Leave it out, and give stow compute_dtype=."
        )
        raise OptionError(message)


def _refuse_unplaced(module: nn.Module) -> None:
    """Raise OptionError where a trained weight is in no placed module: ranks would differ in it."""
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
