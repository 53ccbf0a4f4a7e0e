"""``deepspeed.runtime.zero.partition_parameters``: sharded parameters, and what they are now."""

from tensorstow.deepspeed.zero import GatheredParameters, Init
from tensorstow.deepspeed.zero_params import ZeroParamStatus, is_zero_param

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus", "is_zero_param"]
