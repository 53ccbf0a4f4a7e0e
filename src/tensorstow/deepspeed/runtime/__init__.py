"""``deepspeed.runtime``: what users import from inside upstream, where they look for it."""

from tensorstow.base.absent_names import add_absent_modules
from tensorstow.deepspeed.runtime import (
    activation_checkpointing,
    config,
    dataloader,
    engine,
    lr_schedules,
    utils,
    zero,
)

__all__ = [
    "activation_checkpointing",
    "config",
    "dataloader",
    "engine",
    "lr_schedules",
    "utils",
    "zero",
]

_NO_SECTIONS = (
    "sections of a configuration are no classes here. deepspeed.DeepSpeedConfig reads a whole one,"
    " and checks it"
)
add_absent_modules(
    __name__, dict.fromkeys(("config_utils", "precision_config", "zero.config"), _NO_SECTIONS)
)
