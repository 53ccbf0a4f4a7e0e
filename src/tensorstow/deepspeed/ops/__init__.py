"""``deepspeed.ops``: optimizers by upstream's names."""

from tensorstow.deepspeed.ops import adam

__all__ = ["adam"]
