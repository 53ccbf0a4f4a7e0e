"""``Booster``: places a model and all that trains it, by a plugin."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.booster.plugin.plugin_base import Boosted, Plugin, check_device
from tensorstow.colossalai.interface import OptimizerWrapper


class Booster:
    """Places a model, its optimizer and its scheduler by a plugin.

    Args:
        device: The device of this rank. Default: None, the accelerator, or the CPU where there is
            none. A plugin given here is taken for ``plugin``.
        mixed_precision: Refused unless None: the plugin has ``precision``.
        plugin: How the model is placed.

    Raises:
        OptionError: There is no plugin, or an argument that cannot be honoured.
    """

    def __init__(
        self,
        device: torch.device | str | int | Plugin | None = None,
        mixed_precision: object = None,
        plugin: Plugin | None = None,
    ) -> None:
        """Create the booster; the class documents the arguments."""
        if isinstance(device, Plugin):
            if plugin is not None:
                message = "Two plugins were given, as the first argument and as plugin=: give one."
                raise OptionError(message)
            device, plugin = None, device
        if not isinstance(plugin, Plugin):
            message = (
                f"plugin={plugin!r} was given: Booster(plugin=GeminiPlugin()) places a model;"
                " without a plugin there is nothing to do."
            )
            raise OptionError(message)
        if mixed_precision is not None:
            message = (
                f"mixed_precision={mixed_precision!r} was given: say precision= to the plugin."
            )
            raise OptionError(message)
        check_device(device)
        self.plugin = plugin

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,  # noqa: ANN401  # torch's, or whatever has an optimizer
    ) -> Boosted:
        """Place a model, and make its optimizer anew over what was placed.

        The model is changed in place. The optimizer that was given is closed, and its groups are
        those of the one returned; the scheduler goes on with that.

        Args:
            model: The model.
            optimizer: HybridAdam, CPUAdam, AdamW or Adam (tensorstow's or torch's), over the model,
                that has taken no step. Default: None, for a model that is not trained.
            criterion: Is returned as it is.
            dataloader: Is returned as it is.
            lr_scheduler: A scheduler of ``optimizer``.

        Returns:
            The model, the optimizer, the criterion, the dataloader, the scheduler.

        Raises:
            OptionError: Something cannot be honoured; the model was not changed.
        """
        return self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Compute the gradients of a loss, scaled as the optimizer needs them.

        Args:
            loss: A scalar tensor.
            optimizer: What ``boost`` returned.

        Raises:
            OptionError: The optimizer is another one.
        """
        _boosted(optimizer, "backward()").backward(loss)

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced, where the plugin can.

        Args:
            model: What ``boost`` returned.
            optimizer: What ``boost`` returned.

        Returns:
            The context manager.

        Raises:
            OptionError: The plugin cannot.
        """
        return self.plugin.no_sync(model, optimizer)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[..., Any],
        optimizer: Optimizer | None = None,
        return_loss: bool = True,  # noqa: FBT001, FBT002  # upstream's
        return_outputs: bool = False,  # noqa: FBT001, FBT002
    ) -> NoReturn:
        """Refuse: models are not cut into stages of a pipeline.

        Args:
            data_iter: Not used.
            model: Not used.
            criterion: Not used.
            optimizer: Not used.
            return_loss: Not used.
            return_outputs: Not used.

        Raises:
            OptionError: Always.
        """
        del data_iter, model, criterion, optimizer, return_loss, return_outputs
        message = (
            "execute_pipeline() was called: there is no pipeline of stages here. Call the model,"
            " then Booster.backward; GeminiPlugin places what one device cannot hold elsewhere."
        )
        raise OptionError(message)

    def enable_lora(self, model: nn.Module, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: adapters are made by peft, before ``boost``.

        Args:
            model: Not used.
            args: Not used.
            kwargs: Not used.

        Raises:
            OptionError: Always.
        """
        del model, args, kwargs
        message = (
            "enable_lora() was called: give boost() what peft.get_peft_model(model, config)"
            " returns. Frozen parameters are placed like the others."
        )
        raise OptionError(message)


def _boosted(optimizer: object, what: str) -> OptimizerWrapper:
    if not isinstance(optimizer, OptimizerWrapper):
        message = (
            f"{what} was given a {type(optimizer).__name__}: give it the optimizer that boost()"
            " returned, which is over what was placed."
        )
        raise OptionError(message)
    return optimizer
