"""``deepspeed.compression.helper``: a part of a model by its path, which DeepSpeed-Chat uses."""

from functools import reduce
from typing import Any


def recursive_getattr(model: Any, module_name: str) -> Any:  # noqa: ANN401  # any attribute
    """Return what is at a path in a model.

    Args:
        model: The model.
        module_name: The path, with dots.

    Returns:
        The part.
    """
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: Any, module_name: str, module: Any) -> None:  # noqa: ANN401
    """Put something at a path in a model.

    Args:
        model: The model.
        module_name: The path, with dots.
        module: What is put there.
    """
    *owner, last = module_name.split(".")
    setattr(reduce(getattr, owner, model), last, module)
