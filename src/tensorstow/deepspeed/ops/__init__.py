"""``deepspeed.ops``: optimizers by upstream's names, and I/O."""

from collections import defaultdict

from tensorstow.deepspeed.ops import adagrad, adam, aio, lion, op_builder

__all__ = ["adagrad", "adam", "aio", "lion", "op_builder"]

_BUILDERS = (op_builder.AsyncIOBuilder, op_builder.CPUAdamBuilder, op_builder.FusedAdamBuilder)

__compatible_ops__ = defaultdict(bool, {builder.NAME: True for builder in _BUILDERS})
"""Upstream's table of what a machine can build: False for its other extensions."""
