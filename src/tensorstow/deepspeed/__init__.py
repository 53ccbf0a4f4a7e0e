"""DeepSpeed's names over tensorstow's engine: ``import tensorstow.deepspeed as deepspeed``."""

from tensorstow.deepspeed import checkpointing, ops, runtime, utils, zero
from tensorstow.deepspeed.arguments import add_config_arguments
from tensorstow.deepspeed.engine import DeepSpeedEngine
from tensorstow.deepspeed.initialize import initialize
from tensorstow.deepspeed.ranks import init_distributed
from tensorstow.deepspeed.summary import summary_of

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
