"""LLaMA-Factory's second trainer (``USE_V1=1``): ``optim_config: {name: tensorstow, ...}``.

It is known when this module is imported, which the user's launcher does.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from llamafactory.v1.plugins.trainer_plugins.optimizer import OptimizerPlugin

from tensorstow.base.errors import OptionError
from tensorstow.integrations.late_adamw import is_durable
from tensorstow.optim.adam import AdamW

__all__ = ["adamw"]


@OptimizerPlugin("tensorstow").register()
def adamw(model: torch.nn.Module, config: Mapping[str, Any]) -> AdamW:
    """Return the optimizer of a model that LLaMA-Factory has placed.

    Args:
        model: The model.
        config: Keywords of ``tensorstow.AdamW``, and ``name``. ``dir`` makes checkpoints tickets.

    Returns:
        The optimizer, over what is trained.

    Raises:
        OptionError: No ``lr``, ``overlap="backward"``, or ``dir`` on several processes.
    """
    options = {name: value for name, value in config.items() if name != "name"}
    durable, message = is_durable(options), None
    world = dist.get_world_size() if dist.is_initialized() else 1
    if "lr" not in options:  # LLaMA-Factory does not tell its learning_rate
        message = "optim_config without lr was given: add it, for learning_rate is not passed on."
    elif options.get("overlap") == "backward":
        message = (
            'overlap="backward" was given: LLaMA-Factory asks for the norm of all gradients behind'
            ' backward, and they have been used by then. Use overlap="none" or "forward".'
        )
    elif durable and world > 1:
        message = (
            f"dir={options['dir']!r} was given for {world} processes, and a checkpoint is of rank 0"
            " alone: leave dir= out for scratch files."
        )
    if message is not None:
        raise OptionError(message)
    if durable:
        options = {"checkpoints": "ticket", "commit_every": None, **options}
    trained = [p for p in model.parameters() if p.requires_grad]
    return AdamW(trained, **{"module": model, **options})
