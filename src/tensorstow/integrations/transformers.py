"""The Trainer of transformers and of libraries built on it: TRL, peft, axolotl."""

from typing import Any, cast

import transformers

from tensorstow.deepspeed.config.json_text import Source
from tensorstow.integrations.deepspeed_files import placement_in
from tensorstow.integrations.late_adamw import LateAdamW, is_durable, options_of
from tensorstow.integrations.stowed_trainer import Stowed
from tensorstow.integrations.trainer_refusals import refuse_for_optimizer, refuse_to_attach
from tensorstow.integrations.trainer_snapshots import DropSnapshots
from tensorstow.integrations.trainer_stop import StopCallback

__all__ = [
    "DropSnapshots",
    "LateAdamW",
    "StopCallback",
    "Stowed",
    "adamw",
    "attach",
    "from_deepspeed",
]


def adamw(
    args: transformers.TrainingArguments,
    **keywords: Any,  # AdamW's keywords
) -> tuple[type[LateAdamW], dict[str, Any]]:
    """Return what ``Trainer(optimizer_cls_and_kwargs=)`` takes: AdamW with the Trainer's options.

    Args:
        args: Learning rate, betas, eps and weight decay are taken from them.
        **keywords: Keywords of ``tensorstow.AdamW``: ``states``, ``dir``, ``ram_budget``. With
            ``dir`` checkpoints are snapshot references (``checkpoints="reference"``), and nothing
            commits between them (``commit_every=None``).

    Returns:
        A factory and its keywords.

    Raises:
        OptionError: A combination that would fail later, or go wrong in silence.
    """
    refuse_for_optimizer(args, keywords)
    return LateAdamW, options_of(args, keywords, durable=is_durable(keywords))


def from_deepspeed(
    source: Source,
    args: transformers.TrainingArguments,
    **keywords: Any,  # AdamW's keywords
) -> tuple[type[LateAdamW], dict[str, Any]]:
    """Return what ``Trainer(optimizer_cls_and_kwargs=)`` takes, by a DeepSpeed configuration.

    Leave ``deepspeed=`` out of the Trainer's arguments and keep the file: the optimizer's states go
    where ``offload_optimizer`` says, on disk as scratch files, or with ``dir`` as a durable run.

    Args:
        source: A JSON file or a dict. "auto" takes the Trainer's values.
        args: The Trainer's arguments.
        **keywords: As for ``adamw``; they take precedence over the file's.

    Returns:
        A factory and its keywords.

    Raises:
        OptionError: As for ``adamw``; the file contradicts ``args``, or asks for more than the
            placement of the states: parameters off the device, several ranks, schedulers, other
            optimizers.
    """
    placed = placement_in(source, args)
    if "dir" in keywords:
        placed.pop("durability", None)
    return adamw(args, **{**placed, **keywords})


def attach(trainer: transformers.Trainer, **keywords: Any) -> None:  # AdamW's keywords
    """Make an existing trainer train with ``adamw``.

    For trainers whose constructor takes no ``optimizer_cls_and_kwargs``: TRL's GRPO and DPO.
    With ``dir`` it adds ``DropSnapshots`` too.

    Args:
        trainer: A Trainer that has not begun to train.
        **keywords: As for ``adamw``.

    Raises:
        OptionError: As for ``adamw``, or the trainer has an optimizer already.
    """
    refuse_to_attach(trainer, whole=isinstance(trainer, Stowed))
    trainer.optimizer_cls_and_kwargs = cast("Any", adamw(trainer.args, **keywords))
    if is_durable(keywords):
        trainer.add_callback(DropSnapshots())
