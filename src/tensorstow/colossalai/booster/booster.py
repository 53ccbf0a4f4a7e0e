"""``Booster``: places a model, its optimizer and its scheduler by a plugin."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tensorstow.base.errors import OptionError
from tensorstow.base.signals import StopSignals
from tensorstow.colossalai.booster.plugin.plugin_base import Boosted, Plugin, check_device
from tensorstow.colossalai.checkpoint_io import CheckpointCalls, boosted
from tensorstow.doorkit.keyword_table import checks_keywords, refused, refused_call
from tensorstow.doorkit.stop_point import stop_point


@checks_keywords(refused("pass precision= to the plugin", "mixed_precision"))
class Booster(CheckpointCalls):
    """Places a model, its optimizer and its scheduler by a plugin.

    Args:
        device: The device of this rank. Default: None, the accelerator, or the CPU if there is
            none. A plugin as the first argument counts as ``plugin``.
        plugin: The plugin that places the model.
        stop_signals: The name of a signal ("SIGTERM"), or a dict of exit statuses by names. After
            one, to any rank, the run ends before the forward that follows a step: all ranks call
            ``on_stop`` and raise SystemExit with that status, 0 for a name alone. Python handles
            signals in the main thread alone. Default: None, no signals are handled.
        on_stop: Saves the checkpoints of such a run, by ``save_model`` and the others.

    Raises:
        OptionError: There is no plugin, or an argument that is not supported.
    """

    def __init__(
        self,
        device: torch.device | str | int | Plugin | None = None,
        mixed_precision: object = None,
        plugin: Plugin | None = None,
        *,
        stop_signals: StopSignals = None,
        on_stop: Callable[[], object] | None = None,
    ) -> None:
        if isinstance(device, Plugin):
            if plugin is not None:
                message = "Two plugins were given, as the first argument and as plugin=: pass one."
                raise OptionError(message)
            device, plugin = None, device
        if not isinstance(plugin, Plugin):
            message = (
                f"plugin={plugin!r} was given: Booster needs a plugin to place a model, such as"
                " Booster(plugin=GeminiPlugin())."
            )
            raise OptionError(message)
        check_device(device)
        self.plugin = plugin
        self._stop_signals, self._on_stop = stop_signals, on_stop
        self._has_trained = False
        """Whether it has boosted a model with an optimizer."""

    def boost(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Place a model, and recreate its optimizer over the placed parameters.

        The model is changed in place. ``optimizer`` is closed; the returned optimizer has its
        groups, and the scheduler continues with that one.

        Args:
            model: The model.
            optimizer: HybridAdam, CPUAdam, AdamW or Adam (tensorstow's or torch's), over the model,
                that has taken no step. Default: None, for a model that is not trained: it has no
                states, and None is returned.
            criterion: Returned unchanged.
            dataloader: Returned unchanged.
            lr_scheduler: A scheduler of ``optimizer``.

        Returns:
            The model, the optimizer, the criterion, the dataloader, the scheduler.

        Raises:
            OptionError: An argument is not supported; the model was not changed.
        """
        if self._stop_signals is not None and self._has_trained and optimizer is not None:
            message = (
                "boost() was given a second optimizer by a Booster with stop_signals=, which ends"
                " the run between two steps of one. Leave it out, and save and end in the loop, by"
                " a signal handler of your own."
            )
            raise OptionError(message)
        # Before the model is changed, as all checks of arguments.
        stops = None if optimizer is None else stop_point(self._stop_signals, self._on_stop)
        placed = self.plugin.configure(model, optimizer, criterion, dataloader, lr_scheduler)
        if stops is not None:
            wrapper: Any = placed[0]
            wrapper.stop_point = placed[1].stop_point = stops
            self._has_trained = True
        return placed

    def backward(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Compute the gradients of a loss, scaled as the optimizer needs them.

        Args:
            loss: A scalar tensor.
            optimizer: What ``boost`` returned.

        Raises:
            OptionError: The optimizer is another one.
        """
        boosted(optimizer, "backward()").backward(loss)

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced, if the plugin supports it.

        Args:
            model: What ``boost`` returned.
            optimizer: What ``boost`` returned.

        Raises:
            OptionError: The plugin does not support it.
        """
        return self.plugin.no_sync(model, optimizer)

    execute_pipeline = refused_call(
        "execute_pipeline",
        "pipelines of stages are not supported. Call the model, then Booster.backward; GeminiPlugin"
        " offloads what one device cannot hold",
    )
    enable_lora = refused_call(
        "enable_lora",
        "pass boost() the model that peft.get_peft_model(model, config) returns. Frozen parameters"
        " are placed like the others",
    )
