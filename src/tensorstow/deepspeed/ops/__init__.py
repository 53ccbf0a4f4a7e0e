"""``deepspeed.ops``: optimizers by upstream's names, and I/O."""

from tensorstow.deepspeed.ops import adam, op_builder

__all__ = ["adam", "op_builder"]

__compatible_ops__ = {op_builder.AsyncIOBuilder.NAME: True}
"""Upstream's table of what a machine can build."""
