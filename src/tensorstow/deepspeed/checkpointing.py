"""``deepspeed.checkpointing``: activations that are computed again, and inputs in host memory."""

from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tensorstow.activations.offload import offload_activations
from tensorstow.deepspeed.comm import refuse_model_parallel
from tensorstow.deepspeed.config.json_text import load
from tensorstow.deepspeed.config.values import given_keys, values_of

_IN_CPU = "activation_checkpointing.cpu_checkpointing"


class _Recomputed(nn.Module):
    """Calls a function; of what it saves, its inputs alone are kept."""

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function``, which backward calls again."""
        if kwargs:  # not handed to torch's function, which has keywords of its own
            function = partial(function, **kwargs)
        return torch_checkpoint(function, *args, use_reentrant=False)


_now = SimpleNamespace(is_configured=False, recomputed=_Recomputed())
"""What ``configure`` has set: whether, and a module that may save its tensors in host memory."""


def configure(  # upstream's
    mpu_: object = None,
    deepspeed_config: str | PathLike[str] | Mapping[str, Any] | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configure how ``checkpoint`` keeps the inputs of what is recomputed.

    ``initialize`` calls it with the configuration's ``activation_checkpointing``.

    Args:
        mpu_: An object of model parallelism; refused unless its size is 1.
        deepspeed_config: A configuration, whose ``activation_checkpointing`` is used.
        partition_activations: Each model-parallel rank keeps its part: there is one, which keeps
            the whole.
        contiguous_checkpointing: No effect: torch's allocator is kept.
        num_checkpoints: No effect: each call of ``checkpoint`` is one.
        checkpoint_in_cpu: Whether inputs that are on an accelerator are kept in pinned host memory
            from forward to backward (``tensorstow.offload_activations``). Default: None, the
            configuration's, else they stay.
        synchronize: No effect: use torch.profiler.
        profile: No effect: use torch.profiler.

    Raises:
        OptionError: There are several model-parallel ranks, or the configuration is none.
    """
    del partition_activations, contiguous_checkpointing, num_checkpoints, synchronize, profile
    refuse_model_parallel(mpu_, mpu_=mpu_)
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        checkpoint_in_cpu = values_of(given_keys(load(deepspeed_config)), {})[_IN_CPU]
    # A new module: the hooks of an earlier call stay with the old one.
    reset()
    _now.is_configured = True
    if checkpoint_in_cpu:
        offload_activations(_now.recomputed, to="host")


def is_configured() -> bool:
    """Return whether ``configure`` was called since the last ``reset``."""
    return bool(_now.is_configured)


def reset() -> None:
    """Undo ``configure``. Inputs that are in host memory stay there until their backward."""
    _now.is_configured = False
    _now.recomputed = _Recomputed()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and keep only its inputs; backward calls it again.

    Args:
        function: The function.
        args: Its arguments.
        kwargs: Its keywords.

    Returns:
        What ``function`` returned.
    """
    if torch._C._current_graph_task_id() != -1:  # noqa: SLF001  # inside of one that is called again
        return torch_checkpoint(partial(function, **kwargs), *args, use_reentrant=False)
    return _now.recomputed(function, *args, **kwargs)
