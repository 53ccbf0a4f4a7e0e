"""``deepspeed.pipe``: not here; its names are refused with advice."""

from tensorstow.base.absent_names import refuse_names

__getattr__ = refuse_names(
    __name__,
    "there are no pipeline stages. tensorstow.stow() takes a whole model, whose blocks may be on"
    " disk",
)
