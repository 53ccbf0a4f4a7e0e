"""AdamW with the options and parameter groups of a Trainer of transformers.

[Note: Late] A Trainer moves its model to the device behind its constructor, so an optimizer that
was made before would have parameters that are none of the model's any more.
``optimizer_cls_and_kwargs`` is asked when the model is in its place. What is given there is no
class but a factory, which is told the model: names of parameters, and buffers, go with each
snapshot.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers

from tensorstow.optim.adam import AdamW


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


def is_durable(where: Mapping[str, Any]) -> bool:
    """Return whether keywords of ``AdamW`` make a run that commits to a directory."""
    return where.get("dir") is not None and where.get("durability") != "none"


def options_of(
    args: transformers.TrainingArguments, where: Mapping[str, Any], *, durable: bool
) -> dict[str, Any]:
    """Return keywords of ``AdamW``: those of a Trainer's arguments, then those of ``where``.

    Args:
        args: The Trainer's arguments.
        where: Keywords of ``AdamW``; they come first.
        durable: Whether the run commits. A checkpoint is a ticket then ([Note: Tickets] in
            checkpoint.ticket), and commits are made for checkpoints alone: one of another moment
            would have no trainer state to go on with.
    """
    options: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    if durable:
        options |= {"checkpoints": "ticket", "commit_every": None}
    return {**options, **where}
