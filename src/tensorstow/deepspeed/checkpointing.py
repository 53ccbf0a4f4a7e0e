"""``deepspeed.checkpointing``: activations that are computed again, by torch's own checkpoint."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

_told: dict[str, bool] = {}


def configure(
    mpu_: object = None,
    deepspeed_config: object = None,
    *,
    checkpoint_in_cpu: bool | None = None,
    **more: object,
) -> None:
    """Say how ``checkpoint`` keeps what it is given: with ``checkpoint_in_cpu``, in host memory.

    ``initialize`` calls it with the configuration's ``activation_checkpointing``. Activations are
    not partitioned over model-parallel ranks, of which there are none here; the other arguments are
    accepted and mean nothing.
    """
    del mpu_, deepspeed_config, more
    _told["in_cpu"] = bool(checkpoint_in_cpu)


def is_configured() -> bool:
    """Return whether ``configure`` was called."""
    return bool(_told)


def reset() -> None:
    """Forget what ``configure`` was told."""
    _told.clear()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401  # the function's
    """Call ``function``, keeping its arguments alone; backward calls it again."""
    with _in_cpu() if _told.get("in_cpu") else nullcontext():
        return torch_checkpoint(function, *args, use_reentrant=False)


def _in_cpu() -> save_on_cpu:
    """Return what keeps tensors in host memory, pinned for whichever accelerator there is."""
    away = torch.accelerator.current_accelerator(check_available=True)
    return save_on_cpu() if away is None else save_on_cpu(pin_memory=True, device_type=away.type)
