"""``deepspeed.runtime.zero``: what upstream has in the modules of its stages."""

from tensorstow.deepspeed.runtime.zero import (
    offload_config,
    partition_parameters,
    stage3,
    stage_1_and_2,
    tiling,
)
from tensorstow.deepspeed.zero import GatheredParameters, Init

__all__ = [
    "GatheredParameters",
    "Init",
    "offload_config",
    "partition_parameters",
    "stage3",
    "stage_1_and_2",
    "tiling",
]
