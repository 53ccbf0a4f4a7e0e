"""Base of all plugins: ``configure``, ``prepare_dataloader`` and ``no_sync``."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.sharding import current_device

Boosted = tuple[nn.Module, Any, Any, Any, Any]
"""Model, optimizer, criterion, dataloader, scheduler."""


class Plugin(ABC):
    """How a model is placed. ``Booster`` calls it."""

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,  # noqa: ANN401  # torch's, or any object with an optimizer
    ) -> Boosted:
        """Place the model, for ``Booster.boost``.

        Args:
            model: As of ``Booster.boost``.
            optimizer: As of ``Booster.boost``.
            criterion: As of ``Booster.boost``.
            dataloader: As of ``Booster.boost``.
            lr_scheduler: As of ``Booster.boost``.

        Returns:
            As of ``Booster.boost``.

        Raises:
            OptionError: Something cannot be honoured; the model was not changed.
        """
        placed, made = self._place(model, optimizer, lr_scheduler)
        return placed, made, criterion, dataloader, lr_scheduler

    @abstractmethod
    def _place(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        lr_scheduler: Any,  # noqa: ANN401  # torch's, or any object with an optimizer
    ) -> tuple[nn.Module, Optimizer | None]:
        """Place the model; return it and its optimizer, with which the scheduler goes on."""

    def support_no_sync(self) -> bool:
        """Return whether ``no_sync`` can be called.

        Returns:
            False, unless a plugin overrides it.
        """
        return False

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced.

        Args:
            model: What ``boost`` returned.
            optimizer: What ``boost`` returned.

        Returns:
            The context manager.

        Raises:
            OptionError: The plugin shards gradients as they are computed.
        """
        del model, optimizer
        message = (
            f"no_sync() was called with {type(self).__name__}, which shards gradients once they are"
            " computed: call backward for each micro-batch, then step(); gradients add up."
        )
        raise OptionError(message)

    def prepare_dataloader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shuffle: bool = False,  # noqa: FBT001, FBT002  # upstream's own signature
        seed: int = 1024,
        drop_last: bool = False,  # noqa: FBT001, FBT002
        pin_memory: bool = False,  # noqa: FBT001, FBT002
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,  # noqa: ANN401  # DataLoader's
    ) -> DataLoader[Any]:
        """Return a dataloader that gives each rank its part of a dataset.

        Args:
            dataset: The dataset.
            batch_size: Samples of one batch of one rank.
            shuffle: Whether samples are shuffled in each epoch.
            seed: Of the workers' random numbers.
            drop_last: Whether the last batch is left out if it is smaller.
            pin_memory: Whether batches are pinned.
            num_workers: The number of workers.
            distributed_sampler_cls: What chooses a rank's samples. Default: None,
                ``DistributedSampler``.
            kwargs: As of ``torch.utils.data.DataLoader``.

        Returns:
            The dataloader.
        """
        together = dist.is_initialized()
        sampler = (distributed_sampler_cls or DistributedSampler)(
            dataset,
            num_replicas=dist.get_world_size() if together else 1,
            rank=dist.get_rank() if together else 0,
            shuffle=shuffle,
        )

        def seed_worker(worker: int) -> None:
            del worker  # upstream gives all of them the same
            np.random.seed(seed)  # noqa: NPY002  # the global one, which datasets use
            torch.manual_seed(seed)
            random.seed(seed)

        return DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            worker_init_fn=seed_worker,
            drop_last=drop_last,
            pin_memory=pin_memory,
            num_workers=num_workers,
            **kwargs,
        )


def check_device(given: object) -> None:
    """Check that a device is the one that this rank computes on.

    Args:
        given: A device, its name, an accelerator's index, or None.

    Raises:
        OptionError: It is another one.
    """
    if given is None:
        return
    here = current_device()
    try:
        wanted = torch.device(given)  # type: ignore[call-overload]  # it checks that
    except RuntimeError as error:  # no such device, or an index where there is no accelerator
        message = f"device={given!r} was given, and this rank computes on {here}: {error}"
        raise OptionError(message) from error
    if wanted.type != here.type or (wanted.index is not None and wanted != here):
        message = (
            f"device={given!r} was given, and this rank computes on {here}. Leave it out, or set"
            " the accelerator's index first (launch_from_torch does)."
        )
        raise OptionError(message)
