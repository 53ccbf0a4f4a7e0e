"""Functions of upstream's that are there to say why they cannot be called."""

from collections.abc import Callable
from typing import NoReturn

from tensorstow.base.errors import OptionError


def refused_call(name: str, why: str) -> Callable[..., NoReturn]:
    """Return a function, or a method, that raises OptionError whatever it is given."""

    def refuse(*_: object, **__: object) -> NoReturn:
        message = f"{name}() was called: {why}."
        raise OptionError(message)

    refuse.__name__ = name
    refuse.__doc__ = f"Refuse: {why}.\n\nRaises:\n    OptionError: Always."
    return refuse
