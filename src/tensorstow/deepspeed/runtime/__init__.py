"""``deepspeed.runtime``: what users import from inside upstream, where they look for it."""

from tensorstow.deepspeed.runtime import config, dataloader, engine, lr_schedules, utils, zero

__all__ = ["config", "dataloader", "engine", "lr_schedules", "utils", "zero"]
