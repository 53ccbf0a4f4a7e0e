"""``deepspeed.runtime``: what users import from inside upstream, where they look for it."""

from tensorstow.deepspeed.runtime import engine, lr_schedules, utils, zero

__all__ = ["engine", "lr_schedules", "utils", "zero"]
