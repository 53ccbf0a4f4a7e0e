"""axolotl: a plugin that makes its trainers train with ``tensorstow.AdamW``."""

from collections.abc import Mapping
from typing import Any

import transformers
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from tensorstow.base.errors import OptionError
from tensorstow.integrations.transformers import attach

_GROUPS = ("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale", "lr_groups")
"""axolotl's keys for parameter groups, which apply only to optimizers that it makes itself."""


class Keys(BaseModel):
    """Keys that the plugin adds to axolotl's configuration."""

    tensorstow: dict[str, Any]
    """Keywords of ``tensorstow.AdamW``: the placement of the states."""


class Tensorstow(BasePlugin):
    """The plugin: ``plugins: [tensorstow.integrations.axolotl.Tensorstow]`` names it."""

    def get_input_args(self) -> str:
        """Return the class that describes the plugin's keys."""
        return f"{__name__}.{Keys.__name__}"

    def post_trainer_create(self, cfg: Mapping[str, Any], trainer: transformers.Trainer) -> None:
        """Make the trainer train with ``tensorstow.AdamW``, with its own options and groups.

        Raises:
            OptionError: As for ``attach``, or a key of axolotl's that would be ignored.
        """
        args: Any = trainer.args
        kind = str(getattr(args.optim, "value", args.optim))
        if trainer.optimizer_cls_and_kwargs is not None or not kind.startswith("adamw_torch"):
            message = (
                f"axolotl's optimizer: {cfg.get('optimizer') or kind} was given with the plugin"
                " of tensorstow, which has AdamW: leave it at adamw_torch, or leave the plugin out."
            )
            raise OptionError(message)
        ignored = [name for name in _GROUPS if getattr(args, name, None) is not None]
        if ignored:
            message = (
                f"axolotl's {', '.join(ignored)} was given with the plugin of tensorstow, whose"
                " parameter groups are those of transformers' Trainer: leave it out."
            )
            raise OptionError(message)
        attach(trainer, **cfg["tensorstow"])
