"""``deepspeed.compression``: not here; its names are refused with advice."""

from tensorstow.base.absent_names import refuse_names

__getattr__ = refuse_names(
    __name__,
    "compress the model after training, by torchao",
)
