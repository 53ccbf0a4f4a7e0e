"""AdamW with the options and parameter groups of a Trainer of transformers.

[Note: Late] A Trainer moves its model to the device after its constructor, so an optimizer made
earlier would hold parameters that the model no longer has. ``optimizer_cls_and_kwargs`` is used
once the model is in its place. It gets a factory instead of a class, which takes the model: names
of parameters, and buffers, are part of each snapshot.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import transformers

from tensorstow.optim.adam import AdamW

REFERENCES = {"checkpoints": "reference", "commit_every": None}
"""Keywords of ``AdamW`` by which checkpoints are snapshot references, as the module of that name in
``checkpoint`` describes them."""


class LateAdamW:
    """Factory of ``tensorstow.AdamW`` for a model, with the parameter groups of the Trainer."""

    def __call__(self, model: torch.nn.Module, *_: object, **options: Any) -> AdamW:
        """Return the optimizer of a model that is already on its device.

        Returns:
            The optimizer. ``weight_decay`` is for matrices alone, as in the Trainer.
        """
        # The method uses nothing of the Trainer.
        names = transformers.Trainer.get_decay_parameter_names(cast("Any", None), model)
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in trained if n in names]},
            {"params": [p for n, p in trained if n not in names], "weight_decay": 0.0},
        ]
        return AdamW(groups, **{"module": model, **options})


def is_durable(keywords: Mapping[str, Any]) -> bool:
    """Return whether keywords of ``AdamW`` make a run that commits to a directory."""
    return keywords.get("dir") is not None and keywords.get("durability") != "none"


def options_of(
    args: transformers.TrainingArguments, keywords: Mapping[str, Any], *, durable: bool
) -> dict[str, Any]:
    """Return keywords of ``AdamW``: a Trainer's arguments, updated with ``keywords``."""
    options: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
    }
    if durable:
        # Only checkpoints commit: another commit would have no trainer state to resume from.
        options |= REFERENCES
    return {**options, **keywords}
