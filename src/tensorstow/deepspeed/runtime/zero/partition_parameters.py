"""``deepspeed.runtime.zero.partition_parameters``: sharded parameters, and what they are now."""

from collections.abc import Callable
from typing import Any

import torch

from tensorstow.deepspeed.registry import ZeroParamStatus
from tensorstow.deepspeed.zero import GatheredParameters, Init

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "is_zero_param",
    "zero_wrapper_for_fp_tensor_constructor",
]

_orig_torch_arange = torch.arange  # transformers compares with it


def is_zero_param(parameter: object) -> bool:
    """Return whether a parameter is sharded under stage 3: whether it has ``ds_id``."""
    return isinstance(parameter, torch.Tensor) and hasattr(parameter, "ds_id")


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., torch.Tensor],
    target_fp_dtype: torch.dtype | None = None,
    target_device: torch.device | None = None,
) -> Callable[..., Any]:
    """Return a function of torch as it is: ``zero.Init`` exchanges none.

    transformers puts another function here while it creates a model, so that ``zero.Init`` keeps
    the dtype of ``torch.arange``.

    Args:
        fn: The function.
        target_fp_dtype, target_device: Not used.
    """
    del target_fp_dtype, target_device
    return fn
