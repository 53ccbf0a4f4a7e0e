"""``deepspeed.runtime.zero``: memory estimators in the modules of their stages, layers in tiles."""

from tensorstow.deepspeed.runtime.zero import stage3, stage_1_and_2, tiling

__all__ = ["stage3", "stage_1_and_2", "tiling"]
