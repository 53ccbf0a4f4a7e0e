"""``deepspeed.moe``: parameter groups of models with experts."""

from tensorstow.deepspeed.moe import layer, utils

__all__ = ["layer", "utils"]
