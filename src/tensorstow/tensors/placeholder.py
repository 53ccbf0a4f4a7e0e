"""Tensors without memory, of some shape and dtype, whose values cannot be read."""

from typing import Any, NoReturn, Self

import torch

from tensorstow.base.errors import OptionError

_QUIET = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class Placeholder(torch.Tensor):
    """A tensor of some shape and dtype whose values nobody may ask for.

    Every operation but the ones that only pass it on calls ``refuse``, which a subclass says.
    """

    @staticmethod
    def __new__(
        cls: type[Self],
        like: torch.Tensor,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Self:
        """Stand in for ``like``; None: in its dtype, on its device."""
        return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, dtype=dtype or like.dtype, device=device or like.device
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is: the default would look at the values."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    @staticmethod
    def refuse(operation: str) -> NoReturn:
        """Raise OptionError: ``operation`` was asked of values that are not here."""
        message = f"{operation} was asked of a tensor that only stands for another."
        raise OptionError(message)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "Placeholder":
        """Refuse every operation but the ones that only pass the tensor on."""
        del kwargs
        if func not in _QUIET:
            cls.refuse(str(func))
        return cls(args[0])
