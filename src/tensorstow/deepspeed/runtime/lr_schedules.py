"""``deepspeed.runtime.lr_schedules``: schedules to make by hand, for any optimizer of torch."""

from tensorstow.deepspeed.rates.schedulers import (
    LRRangeTest,
    OneCycle,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]
