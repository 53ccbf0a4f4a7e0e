"""Base of all plugins: ``configure``, ``prepare_dataloader`` and ``no_sync``."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

from tensorstow.base.errors import OptionError
from tensorstow.colossalai.initialize import set_seed
from tensorstow.fsdp.sharding import current_device, rank_here, world_size

Boosted = tuple[nn.Module, Any, Any, Any, Any]
"""Model, optimizer, criterion, dataloader, scheduler."""


class Plugin(ABC):
    """Places a model; ``Booster`` calls it."""

    def configure(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        dataloader: DataLoader[Any] | None = None,
        lr_scheduler: Any = None,
    ) -> Boosted:
        """Place the model, for ``Booster.boost``.

        Args:
            model, optimizer, criterion, dataloader, lr_scheduler: As of ``Booster.boost``.

        Returns:
            As of ``Booster.boost``.

        Raises:
            OptionError: An argument is not supported; the model was not changed.
        """
        placed, wrapper = self._place(model, optimizer, lr_scheduler)
        return placed, wrapper, criterion, dataloader, lr_scheduler

    @abstractmethod
    def _place(
        self, model: nn.Module, optimizer: Optimizer | None, lr_scheduler: Any
    ) -> tuple[nn.Module, Optimizer | None]:
        """Place the model; return it and its optimizer, which the scheduler then uses."""

    def support_no_sync(self) -> bool:
        """Return whether ``no_sync`` can be called: not unless a plugin overrides it."""
        return False

    def no_sync(
        self, model: nn.Module | None = None, optimizer: Optimizer | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which gradients are not reduced.

        Args:
            model: The model that ``boost`` returned.
            optimizer: The optimizer that ``boost`` returned.

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
        shuffle: bool = False,  # upstream's own signature
        seed: int = 1024,
        drop_last: bool = False,
        pin_memory: bool = False,
        num_workers: int = 0,
        distributed_sampler_cls: type | None = None,
        **kwargs: Any,
    ) -> DataLoader[Any]:
        """Return a dataloader that gives each rank its part of a dataset.

        Args:
            dataset: The dataset.
            batch_size: Samples of one batch of one rank.
            shuffle: Whether samples are shuffled in each epoch.
            seed: The seed of the workers' random numbers.
            drop_last: Whether the last batch is left out if it is smaller.
            pin_memory: Whether batches are pinned.
            num_workers: The number of workers.
            distributed_sampler_cls: The class that chooses a rank's samples. Default: None,
                ``DistributedSampler``.
            kwargs: As of ``torch.utils.data.DataLoader``.
        """
        sampler = (distributed_sampler_cls or DistributedSampler)(
            dataset, num_replicas=world_size(), rank=rank_here(), shuffle=shuffle
        )

        def seed_worker(worker: int) -> None:
            del worker  # upstream seeds all workers alike
            set_seed(seed)

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


def check_device(device: object) -> None:
    """Raise OptionError for a device other than the one on which this rank computes."""
    if device is None:
        return
    current = current_device()
    try:
        wanted = torch.device(device)  # type: ignore[call-overload]  # it checks that
    except RuntimeError as error:  # no such device, or an index where there is no accelerator
        message = f"device={device!r} was given, and this rank computes on {current}: {error}"
        raise OptionError(message) from error
    if wanted.type != current.type or (wanted.index is not None and wanted != current):
        message = (
            f"device={device!r} was given, and this rank computes on {current}. Leave it out, or"
            " set the accelerator's index first (launch_from_torch does)."
        )
        raise OptionError(message)
