"""``deepspeed.checkpointing``: activations that are computed again, by torch's own checkpoint."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint as torch_checkpoint

_settings: dict[str, bool] = {}


def configure(
    mpu_: object = None,
    deepspeed_config: object = None,
    *,
    checkpoint_in_cpu: bool | None = None,
    **more: object,
) -> None:
    """Configure how ``checkpoint`` keeps the inputs of what is recomputed.

    ``initialize`` calls it with the configuration's ``activation_checkpointing``. The other
    arguments of upstream's are accepted and have no effect: activations are not partitioned over
    ranks here.

    Args:
        mpu_: Not used.
        deepspeed_config: Not used.
        checkpoint_in_cpu: Whether inputs are kept in host memory. Default: None, they are not.
        more: Not used.
    """
    del mpu_, deepspeed_config, more
    _settings["in_cpu"] = bool(checkpoint_in_cpu)


def is_configured() -> bool:
    """Return whether ``configure`` was called.

    Returns:
        True after ``configure``, until ``reset``.
    """
    return bool(_settings)


def reset() -> None:
    """Undo ``configure``."""
    _settings.clear()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401  # the function's
    """Call a function and keep only its inputs; backward calls it again.

    Args:
        function: The function.
        args: Its arguments.

    Returns:
        What ``function`` returned.
    """
    with _in_cpu() if _settings.get("in_cpu") else nullcontext():
        return torch_checkpoint(function, *args, use_reentrant=False)


def _in_cpu() -> save_on_cpu:
    """Return a context that saves tensors in host memory, pinned if there is an accelerator."""
    away = torch.accelerator.current_accelerator(check_available=True)
    return save_on_cpu() if away is None else save_on_cpu(pin_memory=True, device_type=away.type)
