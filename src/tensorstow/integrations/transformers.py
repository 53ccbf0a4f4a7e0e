"""The Trainer of transformers, and of what is built on it: TRL, peft, axolotl.

[Note: Late] A Trainer moves its model to the device behind its constructor, so an optimizer that
was made before would have parameters that are none of the model's any more.
``optimizer_cls_and_kwargs`` is asked when the model is in its place. What is given there is no
class but a factory, which is told the model: names of parameters, and buffers, go with each
snapshot.

A checkpoint of a run with ``dir=`` is a ticket ([Note: Tickets] in checkpoint.ticket), and commits
are made for checkpoints alone: one of another moment would have no trainer state to go on with.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
import transformers

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.ticket import is_own, is_ticket, snapshot_named_by
from tensorstow.deepspeed.config.json_text import Source
from tensorstow.integrations.deepspeed_files import placement_in
from tensorstow.optim.adam import AdamW

_OPTIMIZER = "optimizer.pt"
_LARGEST_TICKET = 1 << 20
"""In bytes; what is larger has states."""


class LateAdamW:
    """Makes ``tensorstow.AdamW`` for a model, with the parameter groups of the Trainer."""

    def __call__(self, model: torch.nn.Module, *_: object, **options: Any) -> AdamW:  # noqa: ANN401
        """Return the optimizer of a model that is where it will be trained.

        Args:
            model: The model.
            *_: Trainers built on transformers' pass their arguments too.
            **options: Keywords of ``tensorstow.AdamW``.

        Returns:
            The optimizer: ``weight_decay`` is for matrices alone, as in the Trainer.
        """
        # It uses nothing of the Trainer.
        names = transformers.Trainer.get_decay_parameter_names(cast("Any", None), model)
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in trained if n in names]},
            {"params": [p for n, p in trained if n not in names], "weight_decay": 0.0},
        ]
        return AdamW(groups, **{"module": model, **options})


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
        self._known = _named_below(Path(str(args.output_dir)))

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
        there = _named_below(Path(str(args.output_dir)))
        kept = {name for summary in optimizer.snapshots() for name in summary.names}
        for name in sorted((self._known - there) & kept):
            optimizer.drop(name)
        self._known = there


def adamw(
    args: transformers.TrainingArguments,
    **where: Any,  # noqa: ANN401  # AdamW's keywords
) -> tuple[type[LateAdamW], dict[str, Any]]:
    """Return what ``Trainer(optimizer_cls_and_kwargs=)`` takes: AdamW with the Trainer's options.

    Args:
        args: Learning rate, betas, eps and weight decay are taken from them.
        **where: Keywords of ``tensorstow.AdamW``: ``states``, ``dir``, ``ram_budget``. With ``dir``
            checkpoints are tickets (``checkpoints="ticket"``), and nothing commits between them
            (``commit_every=None``).

    Returns:
        A factory and its keywords.

    Raises:
        OptionError: A combination that would fail later, or go wrong in silence.
    """
    _refuse(args, where)
    options: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    if _is_durable(where):
        options |= {"checkpoints": "ticket", "commit_every": None}
    return LateAdamW, {**options, **where}


def from_deepspeed(
    source: Source,
    args: transformers.TrainingArguments,
    **where: Any,  # noqa: ANN401  # AdamW's keywords
) -> tuple[type[LateAdamW], dict[str, Any]]:
    """Return what ``Trainer(optimizer_cls_and_kwargs=)`` takes, by a DeepSpeed configuration.

    Leave ``deepspeed=`` out of the Trainer's arguments and keep the file: the optimizer's states go
    where ``offload_optimizer`` says, on disk as scratch files, or with ``dir`` as a durable run.

    Args:
        source: A JSON file or a dict. "auto" takes the Trainer's values.
        args: The Trainer's arguments.
        **where: As for ``adamw``; they come before the file's.

    Returns:
        A factory and its keywords.

    Raises:
        OptionError: As for ``adamw``; the file contradicts ``args``, or asks for more than a place
            for the states: parameters off the device, several ranks, schedulers, other optimizers.
    """
    placed = placement_in(source, args)
    if "dir" in where:
        placed.pop("durability", None)
    return adamw(args, **{**placed, **where})


def attach(trainer: transformers.Trainer, **where: Any) -> None:  # noqa: ANN401  # AdamW's keywords
    """Let a trainer that is made already train with ``adamw``.

    For trainers whose constructor takes no ``optimizer_cls_and_kwargs``: TRL's GRPO and DPO.
    With ``dir`` it adds ``DropSnapshots`` too.

    Args:
        trainer: A Trainer that has not begun to train.
        **where: As for ``adamw``.

    Raises:
        OptionError: As for ``adamw``, or the trainer has an optimizer already.
    """
    if trainer.optimizer is not None:
        kind = type(trainer.optimizer).__name__
        message = (
            f"attach() was called for a trainer that has an optimizer already ({kind}). Make the"
            " trainer without optimizers=, and call attach() before train()."
        )
        raise OptionError(message)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise OptionError(_DEEPSPEED if trainer.is_deepspeed_enabled else _FSDP)
    trainer.optimizer_cls_and_kwargs = cast("Any", adamw(trainer.args, **where))
    if _is_durable(where):
        trainer.add_callback(DropSnapshots())


def _is_durable(where: Mapping[str, Any]) -> bool:
    return where.get("dir") is not None and where.get("durability") != "none"


def _named_below(folder: Path) -> set[str]:
    """Return the snapshots that the tickets of the checkpoints in a folder name."""
    found = set()
    for path in folder.glob(f"checkpoint-*/{_OPTIMIZER}"):
        if path.stat().st_size <= _LARGEST_TICKET:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            name = snapshot_named_by(saved) if is_ticket(saved) else None
            if name is not None and is_own(name):
                found.add(name)
    return found


# --- what is refused ---

_DEEPSPEED = (
    "A Trainer with deepspeed= was given: accelerate would put DeepSpeed's own optimizer in the"
    " place of this one, with another weight decay. Leave deepspeed= out, and"
    " pass from_deepspeed(file, args) as optimizer_cls_and_kwargs."
)
_FSDP = (
    "A Trainer with fsdp= was given: it exchanges the parameters when the optimizer is made, whose"
    " memory and disk are for whole ones by then, on every rank. Leave fsdp= out on one rank; on"
    " several shard with tensorstow.stow in a loop of your own."
)
_BACKWARD = (
    'overlap="backward" was given: a Trainer asks for the norm of all gradients behind backward,'
    ' also with max_grad_norm=0, and they have been used by then. Use overlap="none" or "forward".'
)
_RANKS = (
    "dir={directory!r} was given for {world} processes: each has all parameters and would keep a"
    " copy of all states, and a checkpoint is of rank 0 alone. Leave dir= out for scratch files, or"
    " shard with tensorstow.stow in a loop of your own."
)
_BATCH_SIZE = (
    "dir={directory!r} was given with auto_find_batch_size=True: the second try would find the run"
    " of the first one there. Choose per_device_train_batch_size yourself."
)


def _refuse(args: transformers.TrainingArguments, where: Mapping[str, Any]) -> None:
    """Raise OptionError for what would fail in the first step or later, or be wrong in silence."""
    message = None
    if where.get("overlap") == "backward":
        message = _BACKWARD
    elif args.deepspeed:
        message = _DEEPSPEED
    elif args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in {"1", "true"}:
        message = _FSDP
    elif _is_durable(where) and args.world_size > 1:
        message = _RANKS.format(directory=where["dir"], world=args.world_size)
    elif _is_durable(where) and args.auto_find_batch_size:
        message = _BATCH_SIZE.format(directory=where["dir"])
    if message is not None:
        raise OptionError(message)
