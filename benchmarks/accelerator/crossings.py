"""Counts the bytes that torch copies between host memory and a device."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPY, _TO_COPY = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default  # noqa: SLF001


class Crossings(TorchDispatchMode):
    """Counts them inside its context, in backward's threads too.

    Copies of a tensor to another device in another dtype cross in the dtype of the device's side,
    as CUDA's do.
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        super().__init__()
        self.down = 0
        self.up = 0

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run ``func``; count it where it is a copy between the two."""
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(type(t) not in {torch.Tensor, torch.nn.Parameter} for t in tensors):
            return NotImplemented  # what these do inside comes by here again
        out = func(*args, **(kwargs or {}))
        if func in {_COPY, _TO_COPY}:
            source = args[1] if func == _COPY else args[0]
            self._count(source, out)
        return out

    def _count(self, source: torch.Tensor, target: torch.Tensor) -> None:
        if source.is_cpu and not target.is_cpu:
            self.up += target.nbytes
        elif target.is_cpu and not source.is_cpu:
            self.down += source.nbytes
