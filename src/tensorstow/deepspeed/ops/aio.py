"""``deepspeed.ops.aio``: where scripts look for ``AsyncIOBuilder``."""

from tensorstow.deepspeed.ops.op_builder import AsyncIOBuilder

__all__ = ["AsyncIOBuilder"]
