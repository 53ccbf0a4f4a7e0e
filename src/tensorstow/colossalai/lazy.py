"""``LazyInitContext``: models are made at once, in host memory."""

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.doorkit.construction import ConstructionContext


class LazyInitContext(ConstructionContext):
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
        self, tensor_cls: type | None = None, default_device: torch.device | str | int | None = None
    ) -> None:
        if tensor_cls is not None:
            message = (
                f"tensor_cls={tensor_cls!r} was given: no tensor is deferred here, so there is no"
                " class of deferred ones. Leave it out."
            )
            raise OptionError(message)
        super().__init__("cpu" if default_device is None else default_device)

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Return a module as it is: nothing was deferred.

        Args:
            module: The module.
            verbose: Whether upstream prints what it made; there is nothing to print.
        """
        del verbose
        return module
