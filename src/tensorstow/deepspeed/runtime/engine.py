"""``deepspeed.runtime.engine``: the engine, where upstream has it."""

from tensorstow.deepspeed.engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
