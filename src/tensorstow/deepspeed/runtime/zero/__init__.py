"""``deepspeed.runtime.zero``: the memory estimators, in the modules of their stages."""

from tensorstow.deepspeed.runtime.zero import stage3, stage_1_and_2

__all__ = ["stage3", "stage_1_and_2"]
