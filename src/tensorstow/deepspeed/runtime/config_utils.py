"""``deepspeed.runtime.config_utils``: not here; its names are refused with advice."""

from tensorstow.base.absent_names import refuse_names

__getattr__ = refuse_names(
    __name__,
    "sections of a configuration are no classes here. deepspeed.DeepSpeedConfig reads a whole one,"
    " and checks it",
)
