"""What stands in ``.grad`` for a gradient that has left it."""

from typing import Any, NoReturn, Self

import torch

from tensorstow.base.errors import OptionError

WAYS_OUT = (
    "Call step() first, which updates by the gradients that have come; or, where backward did not"
    " end, resume(), which drops them and goes back to the last commit of a run that has dir=."
)
"""What to do about a step that is open beside backward."""
_QUIET = frozenset(
    {
        torch.ops.aten.detach.default,
        torch.ops.aten.alias.default,
    }
)


class LandedGradient(torch.Tensor):
    """A tensor without memory, of the gradient's shape: its update has begun.

    Nobody may take it for a gradient: clipping, unscaling and accumulation, which would do nothing
    to a ``None`` and say nothing, raise OptionError here.
    """

    @staticmethod
    def __new__(cls: type[Self], gradient: torch.Tensor) -> Self:
        """Stand in for ``gradient``."""
        return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, gradient.shape, dtype=gradient.dtype, device=gradient.device
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is: the default would look at the values."""
        return f"LandedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "LandedGradient":
        """Refuse every operation but the ones that only pass the tensor on."""
        del kwargs
        if func not in _QUIET:
            refuse(str(func))
        return cls(args[0])


def refuse(operation: str) -> NoReturn:
    """Raise OptionError: ``operation`` was asked of a gradient that is used up already."""
    message = (
        f"{operation} was asked of a gradient that its update has used already: with"
        ' overlap="backward" a gradient is gone as soon as it is final. A second backward before'
        " step() needs accumulation_steps= or `with optimizer.accumulate():`; clipping, unscaling"
        f' and whatever else looks at gradients needs overlap="forward" or "none". {WAYS_OUT}'
    )
    raise OptionError(message)
