"""DeepSpeed's interface: ``import tensorstow.deepspeed as deepspeed``."""

from tensorstow.deepspeed import checkpointing, ops, runtime, utils, zero
from tensorstow.deepspeed.config.summary import summary_of
from tensorstow.deepspeed.engine import DeepSpeedEngine
from tensorstow.deepspeed.initialize import add_config_arguments, initialize
from tensorstow.deepspeed.ranks import init_distributed

__all__ = [
    "DeepSpeedEngine",
    "add_config_arguments",
    "checkpointing",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "summary_of",
    "utils",
    "zero",
]
