"""Errors for names of ColossalAI that do not exist here, with the reason and what to use."""

from collections.abc import Mapping
from typing import NoReturn

from tensorstow.base.errors import AbsentError

BY_UNITS = "parameters move by the model's blocks, and there are no chunks"


def refuse(module: str, name: str, absent: Mapping[str, str]) -> NoReturn:
    """Refuse a name, as ``__getattr__`` of a module.

    Args:
        module: The module's name.
        name: The name.
        absent: Why names are not here, by name.

    Raises:
        AbsentError: It is one of them.
        AttributeError: It is another one.
    """
    if name in absent:
        message = f"{name} is not in {module}: {absent[name]}."
        raise AbsentError(message)
    message = f"module {module!r} has no attribute {name!r}"
    raise AttributeError(message)
