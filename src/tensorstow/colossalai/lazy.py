"""``LazyInitContext``: models are made at once, in host memory."""

from types import TracebackType
from typing import Self

import torch
from torch import nn

from tensorstow.base.errors import OptionError


class LazyInitContext:
    """A context in which a ColossalAI script creates its model.

    Nothing is deferred: parameters have their values when the model is made, the same as without
    the context, in host memory, from where ``Booster.boost`` places them. A model that is larger
    than host memory is made on the meta device and placed by ``tensorstow.stow(weights=...)``.

    Args:
        tensor_cls: The class of deferred tensors; only None is taken.
        default_device: Where parameters are made. Default: None, host memory.

    Raises:
        OptionError: ``tensor_cls`` was given.
    """

    def __init__(
        self,
        tensor_cls: type | None = None,
        default_device: torch.device | str | int | None = None,
    ) -> None:
        """Create the context; the class documents the arguments."""
        if tensor_cls is not None:
            message = (
                f"tensor_cls={tensor_cls!r} was given: no tensor is deferred here, so there is no"
                " class of deferred ones. Leave it out."
            )
            raise OptionError(message)
        self._device = torch.device("cpu" if default_device is None else default_device)

    def __enter__(self) -> Self:
        """Let tensors be made on the device."""
        self._device.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let tensors be made where they were before."""
        self._device.__exit__(kind, error, trace)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:  # noqa: FBT001, FBT002
        """Return a module as it is: nothing was deferred.

        Args:
            module: The module.
            verbose: Whether upstream prints what it made; there is nothing to print.

        Returns:
            The module.
        """
        del verbose
        return module
