"""``deepspeed.ops``: optimizers by upstream's names, and I/O."""

from tensorstow.deepspeed.ops import adam, op_builder

__all__ = ["adam", "op_builder"]
