"""``deepspeed.runtime.zero``: what upstream has in the modules of its stages."""

from tensorstow.deepspeed.registry import ZeroParamStatus
from tensorstow.deepspeed.runtime.zero import (
    offload_config,
    partition_parameters,
    stage3,
    stage_1_and_2,
    tiling,
)
from tensorstow.deepspeed.zero import (
    GatheredParameters,
    Init,
    MiCS_Init,
    TiledLinear,
    register_external_parameter,
    unwrap_model_for_generation,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "ZeroParamStatus",
    "offload_config",
    "partition_parameters",
    "register_external_parameter",
    "stage3",
    "stage_1_and_2",
    "tiling",
    "unwrap_model_for_generation",
]
