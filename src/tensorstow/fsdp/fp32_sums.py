"""Hooks that sum gradients of several micro-batches in fp32 on the device."""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from tensorstow.tensors.dtensor import set_gradient


def accumulate_in_fp32(parameters: Iterable[torch.Tensor]) -> None:
    """Make autograd sum the gradients of unsharded parameters over backward passes in fp32.

    Within one backward the sum keeps the gradient's dtype, like sums of FSDP2.
    """
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            sums: dict[str, torch.Tensor] = {}
            hook: Any = parameter.register_post_accumulate_grad_hook
            if parameter.requires_grad:
                before: Any = parameter.register_hook
                before(partial(_set_aside, weakref.ref(parameter), sums))
                hook(partial(_put_back, sums))


@torch.no_grad()
def _set_aside(
    reference: "weakref.ref[torch.Tensor]", sums: dict[str, torch.Tensor], gradient: torch.Tensor
) -> None:
    parameter = reference()
    if parameter is not None and parameter.grad is not None:
        sums["wide"] = parameter.grad.float().add_(gradient)
        parameter.grad = None


@torch.no_grad()
def _put_back(sums: dict[str, torch.Tensor], parameter: torch.Tensor) -> None:
    if "wide" in sums:
        set_gradient(parameter, sums.pop("wide"))


@torch.no_grad()
def widen_gradient(parameter: torch.Tensor) -> None:
    """Make a gradient fp32 that stays on the device; FSDP2 calls this hook of the parameter.

    FSDP2 adds the next micro-batch's gradient to it.
    """
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        set_gradient(parameter, parameter.grad.float())
