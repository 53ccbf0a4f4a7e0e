"""``deepspeed.moe.utils``: which parameters are of experts. Experts of upstream's are not here."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): no layer is of upstream's class of experts."""
    del m
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Return whether a parameter's ``allreduce`` is False, as upstream marks experts'."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return two lists: the parameters that all ranks share, and those of experts."""
    listed = list(params)
    return [p for p in listed if not is_moe_param(p)], [p for p in listed if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float = 178956971
) -> list[dict[str, Any]]:
    """Return parameter groups in which no group has parameters of experts with others.

    Args:
        param_groups: A group, or several.
        max_group_size: Not used: it cuts groups of experts.

    Raises:
        OptionError: A parameter is one of an expert, which is one rank's own.
    """
    del max_group_size
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    for group in groups:
        group["params"] = list(group["params"])
        if any(is_moe_param(p) for p in group["params"]):
            message = (
                "A parameter was given whose allreduce is False, as of an expert that one rank has"
                " alone: here all ranks share experts. Leave the attribute out."
            )
            raise OptionError(message)
    return groups
