"""``Booster``: places a model, its optimizer and its scheduler by a plugin."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tensorstow.base.errors import OptionError
from tensorstow.colossalai import checkpoint_io
from tensorstow.colossalai.booster.plugin.plugin_base import Boosted, Plugin, check_device
from tensorstow.colossalai.interface import OptimizerWrapper
from tensorstow.doorkit.keyword_table import checks_keywords, no_effect, refused

_ONE_THREAD = "one thread reads one file at a time"
_LOADING = no_effect(_ONE_THREAD, "low_cpu_mem_mode", "num_threads")
_SAVING = {
    **no_effect(
        "the call returns when the files are durable. Commits are written during training:"
        " tensorstow.stow(model, optimizer, dir=...)",
        "use_async",
    ),
    **refused(
        "tensors are written whole. To write each rank's part, use torch.distributed.checkpoint, or"
        " tensorstow.save_safetensors(by_rank=True)",
        "gather_dtensor",
    ),
}


@checks_keywords(refused("pass precision= to the plugin", "mixed_precision"))
class Booster:
    """Places a model, its optimizer and its scheduler by a plugin.

    Args:
        device: The device of this rank. Default: None, the accelerator, or the CPU if there is
            none. A plugin as the first argument counts as ``plugin``.
        plugin: The plugin that places the model.

    Raises:
        OptionError: There is no plugin, or an argument that is not supported.
    """

    def __init__(
        self,
        device: torch.device | str | int | Plugin | None = None,
        mixed_precision: object = None,
        plugin: Plugin | None = None,
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
        """Return a context in which gradients are not reduced, if the plugin supports it.

        Args:
            model: What ``boost`` returned.
            optimizer: What ``boost`` returned.

        Raises:
            OptionError: The plugin does not support it.
        """
        return self.plugin.no_sync(model, optimizer)

    @checks_keywords(_SAVING)
    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Write the weights and persistent buffers; call it on every rank.

        Args:
            model: What ``boost`` returned.
            checkpoint: A file that torch loads; with ``shard`` a directory.
            shard: Whether there are several files and an index, one weight at a time in memory.
            prefix: Prefix of each name. Default: None, no prefix.
            size_per_shard: The largest size of one of several files, in MiB.
            use_safetensors: Whether files are safetensors. A single file also is if its name ends
                with ".safetensors".

        Raises:
            OptionError: Arguments that are not supported.
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        checkpoint_io.save_model(
            model,
            checkpoint,
            shard=shard,
            prefix=prefix,
            shard_bytes=_shard_bytes(size_per_shard),
            use_safetensors=use_safetensors,
        )

    @checks_keywords(_LOADING)
    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | PathLike[str],
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load weights that ``save_model``, torch or transformers wrote; call it on every rank.

        Args:
            model: What ``boost`` returned.
            checkpoint: A file, an index, or a directory with one or the other.
            strict: Whether the names must be the model's.

        Raises:
            StoreFormatError: There is no checkpoint.
            OptionError: The names differ.
        """
        checkpoint_io.load_model(model, checkpoint, strict=strict)

    @checks_keywords(_SAVING)
    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | PathLike[str],
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Write states, groups and the loss scale; call it on every rank.

        Args:
            optimizer: What ``boost`` returned.
            checkpoint: A file that torch's Adam loads; with ``shard`` a directory.
            shard, size_per_shard: As of ``save_model``.
            prefix: Prefix of the names of several files. Default: None, no prefix.

        Raises:
            OptionError: Arguments that are not supported.
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        checkpoint_io.save_optimizer(
            optimizer,
            checkpoint,
            shard=shard,
            prefix=prefix,
            shard_bytes=_shard_bytes(size_per_shard),
        )

    @checks_keywords(_LOADING)
    def load_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | PathLike[str],
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load what ``save_optimizer`` or torch's Adam wrote; call it on every rank.

        Args:
            optimizer: What ``boost`` returned.
            checkpoint: A file, an index, or the directory that has one.

        Raises:
            StoreFormatError: There is no checkpoint.
            OptionError: States that do not fit their parameters.
        """
        checkpoint_io.load_optimizer(optimizer, checkpoint)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | PathLike[str]) -> None:
        """Write a scheduler's state; call it on every rank.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: The file.

        Raises:
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: str | PathLike[str]) -> None:
        """Load what ``save_lr_scheduler`` wrote.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: The file.

        Raises:
            StoreFormatError: There is no such file.
        """
        checkpoint_io.load_lr_scheduler(lr_scheduler, checkpoint)

    def execute_pipeline(
        self,
        data_iter: Iterator[Any],
        model: nn.Module,
        criterion: Callable[..., Any],
        optimizer: Optimizer | None = None,
        return_loss: bool = True,
        return_outputs: bool = False,
    ) -> NoReturn:
        """Refuse: models are not cut into stages of a pipeline.

        Args:
            data_iter, model, criterion, optimizer, return_loss, return_outputs: Not used.

        Raises:
            OptionError: Always.
        """
        del data_iter, model, criterion, optimizer, return_loss, return_outputs
        message = (
            "execute_pipeline() was called: pipelines of stages are not supported. Call the model,"
            " then Booster.backward; GeminiPlugin offloads what one device cannot hold."
        )
        raise OptionError(message)

    def enable_lora(self, model: nn.Module, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: adapters are made by peft, before ``boost``.

        Args:
            model, args, kwargs: Not used.

        Raises:
            OptionError: Always.
        """
        del model, args, kwargs
        message = (
            "enable_lora() was called: pass boost() the model that peft.get_peft_model(model,"
            " config) returns. Frozen parameters are placed like the others."
        )
        raise OptionError(message)


def _boosted(optimizer: object, call: str) -> OptimizerWrapper:
    if not isinstance(optimizer, OptimizerWrapper):
        message = (
            f"{call} was given a {type(optimizer).__name__}: pass the optimizer that boost()"
            " returned, which updates the placed model."
        )
        raise OptionError(message)
    return optimizer


def _shard_bytes(size_per_shard: int) -> int:
    """Return the largest size of one of several files; raises OptionError for a bad argument."""
    if size_per_shard <= 0:
        message = f"size_per_shard={size_per_shard} was given: it must be above 0, in MiB."
        raise OptionError(message)
    return int(size_per_shard * 2**20)
