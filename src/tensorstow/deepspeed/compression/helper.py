"""``deepspeed.compression.helper``: a part of a model by its path, which DeepSpeed-Chat uses."""

from functools import reduce
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:
    """Return what is at a path in a model, which has dots."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:
    """Put something at a path in a model, which has dots."""
    *owner, last = module_name.split(".")
    setattr(reduce(getattr, owner, model), last, module)
