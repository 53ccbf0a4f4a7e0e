"""``LazyInitContext``: models are made at once, in host memory."""

import torch
from torch import nn

from tensorstow.doorkit.construction import ConstructionContext
from tensorstow.doorkit.keyword_table import checks_keywords, refused


@checks_keywords(refused("no tensor is deferred, so there is no class of such ones", "tensor_cls"))
class LazyInitContext(ConstructionContext):
    """A context in which a ColossalAI script creates its model.

    Nothing is deferred: parameters have their values when the model is made, the same as without
    the context, in host memory, from where ``Booster.boost`` places them. A model that is larger
    than host memory is made on the meta device and placed by ``tensorstow.stow(weights=...)``.

    Args:
        default_device: Where parameters are made. Default: None, host memory.
    """

    def __init__(
        self,
        tensor_cls: type | None = None,  # noqa: ARG002
        default_device: torch.device | str | int | None = None,
    ) -> None:
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
