"""``deepspeed.compression``: not here; its names are refused with advice."""

from tensorstow.base.absent_names import add_absent_modules, refuse_names

_INSTEAD = "compress the model after training, by torchao"
add_absent_modules(__name__, {"compress": _INSTEAD})
__getattr__ = refuse_names(__name__, _INSTEAD)
