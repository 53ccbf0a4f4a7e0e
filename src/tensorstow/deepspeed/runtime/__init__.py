"""``deepspeed.runtime``: what users import from inside upstream, where they look for it."""

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
