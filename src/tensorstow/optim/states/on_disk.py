"""What stands in ``optimizer.state`` for a state that is on disk."""

from typing import Any, NoReturn, Self

import torch

from tensorstow.base.errors import OptionError

_QUIET = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class StateOnDisk(torch.Tensor):
    """A tensor without memory, of the state's shape.

    Whoever asks which states a parameter has (``torch.distributed.checkpoint`` does) finds them;
    whoever looks at their values is told to ask ``state_dict()``.
    """

    @staticmethod
    def __new__(cls: type[Self], parameter: torch.Tensor) -> Self:
        """Stand in for the states of ``parameter``."""
        return torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, parameter.shape, dtype=torch.float32, device=torch.device("cpu")
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is: the default would look at the values."""
        return f"StateOnDisk(shape={tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> "StateOnDisk":
        """Refuse every operation but the ones that only pass the tensor on."""
        del kwargs
        if func not in _QUIET:
            _refuse(str(func))
        return cls(args[0])


def _refuse(operation: str) -> NoReturn:
    message = (
        f"{operation} was asked of a state that is on disk. optimizer.state_dict() returns the"
        " values; put a tensor in its place, or use load_state_dict(), to set them."
    )
    raise OptionError(message)
