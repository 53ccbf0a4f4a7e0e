"""``deepspeed.runtime.dataloader``: a loader that begins again."""

from tensorstow.deepspeed.dataloader import RepeatingLoader

__all__ = ["RepeatingLoader"]
