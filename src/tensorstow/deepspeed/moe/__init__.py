"""``deepspeed.moe``: parameter groups of models with experts."""

from tensorstow.deepspeed.moe import utils

__all__ = ["utils"]
