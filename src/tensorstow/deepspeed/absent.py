"""Modules of upstream's that are not here: what is imported from them is refused by name."""

from collections.abc import Callable

from tensorstow.base.errors import AbsentError


def refuse_names(module: str, instead: str) -> Callable[[str], object]:
    """Return a ``__getattr__`` for a module without names of its own.

    Args:
        module: Its ``__name__``.
        instead: What to do instead.
    """

    def refuse(name: str) -> object:
        if name.startswith("__"):  # what Python itself looks for
            message = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(message)
        message = f"{name} is not in {module}: {instead}."
        raise AbsentError(message)

    return refuse
