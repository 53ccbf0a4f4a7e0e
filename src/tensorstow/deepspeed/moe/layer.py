"""``deepspeed.moe.layer``: not here; its names are refused with advice."""

from tensorstow.base.absent_names import refuse_names

__getattr__ = refuse_names(
    __name__,
    "experts are plain modules here, whose parameters are sharded as others are",
)
