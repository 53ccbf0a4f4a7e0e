"""``deepspeed.runtime.zero.stage_1_and_2``: what a model needs under stage 2."""

from tensorstow.deepspeed.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
)

__all__ = [
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
]
