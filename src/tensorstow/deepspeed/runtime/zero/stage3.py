"""``deepspeed.runtime.zero.stage3``: what a model needs under stage 3, and whole weights."""

from tensorstow.deepspeed.estimators import (
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from tensorstow.deepspeed.zero import unwrap_model_for_generation

__all__ = [
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "unwrap_model_for_generation",
]
