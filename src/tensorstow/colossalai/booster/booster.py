"""``Booster``: places a model and all that trains it, by a plugin."""

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
from tensorstow.colossalai.booster.plugin.place_model import tell_idle
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
        lr_scheduler: Any = None,  # noqa: ANN401  # torch's, or any object with an optimizer
    ) -> Boosted:
        """Place a model, and recreate its optimizer over the placed parameters.

        The model is changed in place. The optimizer that was given is closed, and its groups are
        those of the one returned; the scheduler goes on with that.

        Args:
            model: The model.
            optimizer: HybridAdam, CPUAdam, AdamW or Adam (tensorstow's or torch's), over the model,
                that has taken no step. Default: None, for a model that is not trained: there are
                no states, and None is returned.
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

    def save_model(
        self,
        model: nn.Module,
        checkpoint: str | PathLike[str],
        shard: bool = False,  # noqa: FBT001, FBT002  # upstream's
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,  # noqa: FBT001, FBT002
        use_async: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Write the weights and persistent buffers; call it on every rank.

        Args:
            model: What ``boost`` returned.
            checkpoint: A file that torch loads; with ``shard`` a directory.
            shard: Whether there are several files and an index, one weight at a time in memory.
            gather_dtensor: Refused unless True: tensors are written whole.
            prefix: Is put before each name. Default: None, nothing.
            size_per_shard: The largest size of one of several files, in MiB.
            use_safetensors: Whether files are safetensors, as one file is in any case whose name
                ends with ".safetensors".
            use_async: No effect; True is logged (WARNING): it returns when the files are
                durable.

        Raises:
            OptionError: Arguments that cannot be honoured.
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        _tell_of_saving(use_async=use_async)
        checkpoint_io.save_model(
            model,
            checkpoint,
            shard=shard,
            prefix=prefix,
            shard_bytes=_shard_bytes(size_per_shard, gathers=gather_dtensor),
            use_safetensors=use_safetensors,
        )

    def load_model(
        self,
        model: nn.Module,
        checkpoint: str | PathLike[str],
        strict: bool = True,  # noqa: FBT001, FBT002  # upstream's
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002
        num_threads: int = 1,
    ) -> None:
        """Load weights that ``save_model``, torch or transformers wrote; call it on every rank.

        Args:
            model: What ``boost`` returned.
            checkpoint: A file, an index, or a directory with one or the other.
            strict: Whether the names must be the model's.
            low_cpu_mem_mode: No effect; False is logged (WARNING): one file at a time is
                in memory.
            num_threads: No effect; another number is logged: one thread reads.

        Raises:
            StoreFormatError: There is no checkpoint.
            OptionError: The names differ.
        """
        _tell_of_loading(low_cpu_mem_mode=low_cpu_mem_mode, num_threads=num_threads)
        checkpoint_io.load_model(model, checkpoint, strict=strict)

    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | PathLike[str],
        shard: bool = False,  # noqa: FBT001, FBT002  # upstream's
        gather_dtensor: bool = True,  # noqa: FBT001, FBT002
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,  # noqa: FBT001, FBT002
    ) -> None:
        """Write states, groups and the loss scale; call it on every rank.

        Args:
            optimizer: What ``boost`` returned.
            checkpoint: A file that torch's Adam loads; with ``shard`` a directory.
            shard: As of ``save_model``.
            gather_dtensor: As of ``save_model``.
            prefix: Is put before the names of several files. Default: None, nothing.
            size_per_shard: As of ``save_model``.
            use_async: As of ``save_model``.

        Raises:
            OptionError: Arguments that cannot be honoured.
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        _tell_of_saving(use_async=use_async)
        checkpoint_io.save_optimizer(
            optimizer,
            checkpoint,
            shard=shard,
            prefix=prefix,
            shard_bytes=_shard_bytes(size_per_shard, gathers=gather_dtensor),
        )

    def load_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: str | PathLike[str],
        low_cpu_mem_mode: bool = True,  # noqa: FBT001, FBT002  # upstream's
        num_threads: int = 1,
    ) -> None:
        """Load what ``save_optimizer`` or torch's Adam wrote; call it on every rank.

        Args:
            optimizer: What ``boost`` returned.
            checkpoint: A file, an index, or the directory that has one.
            low_cpu_mem_mode: As of ``load_model``.
            num_threads: As of ``load_model``.

        Raises:
            StoreFormatError: There is no checkpoint.
            OptionError: States that do not fit their parameters.
        """
        _tell_of_loading(low_cpu_mem_mode=low_cpu_mem_mode, num_threads=num_threads)
        checkpoint_io.load_optimizer(optimizer, checkpoint)

    def save_lr_scheduler(
        self,
        lr_scheduler: Any,  # noqa: ANN401  # torch's, or any object with a state
        checkpoint: str | PathLike[str],
    ) -> None:
        """Write a scheduler's state; call it on every rank.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: The file.

        Raises:
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        checkpoint_io.save_lr_scheduler(lr_scheduler, checkpoint)

    def load_lr_scheduler(
        self,
        lr_scheduler: Any,  # noqa: ANN401  # torch's, or any object with a state
        checkpoint: str | PathLike[str],
    ) -> None:
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


def _tell_of_loading(*, low_cpu_mem_mode: bool, num_threads: int) -> None:
    """Log which keywords of a load change nothing."""
    why = "one thread reads one file at a time"
    tell_idle(
        "Booster",
        {"low_cpu_mem_mode": (True, why), "num_threads": (1, why)},
        low_cpu_mem_mode=low_cpu_mem_mode,
        num_threads=num_threads,
    )


def _tell_of_saving(*, use_async: bool) -> None:
    """Log that a keyword of a save changes nothing."""
    why = (
        "the call returns when the files are durable. Commits are written beside training:"
        " tensorstow.stow(model, optimizer, dir=...)"
    )
    tell_idle("Booster", {"use_async": (False, why)}, use_async=use_async)


def _shard_bytes(size_per_shard: int, *, gathers: bool) -> int:
    """Return the largest size of one of several files; raises OptionError for what is refused."""
    if not gathers:
        message = (
            "gather_dtensor=False was given: tensors are written whole. Each rank writes its own by"
            " torch.distributed.checkpoint, or by tensorstow.save_safetensors(by_rank=True)."
        )
        raise OptionError(message)
    if size_per_shard <= 0:
        message = f"size_per_shard={size_per_shard} was given: it is a size in MiB, above 0."
        raise OptionError(message)
    return int(size_per_shard * 2**20)
