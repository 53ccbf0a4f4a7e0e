"""``deepspeed.moe``: parameter groups of models with experts."""

from tensorstow.base.absent_names import add_absent_modules, refuse_names
from tensorstow.deepspeed.moe import utils

__all__ = ["utils"]

_ABSENT = {"layer": "experts are plain modules here, whose parameters are sharded as others are"}
add_absent_modules(__name__, _ABSENT)
__getattr__ = refuse_names(__name__, _ABSENT)
