"""``deepspeed.runtime``: what users import from inside upstream, where they look for it."""

from tensorstow.deepspeed.runtime import lr_schedules, zero

__all__ = ["lr_schedules", "zero"]
