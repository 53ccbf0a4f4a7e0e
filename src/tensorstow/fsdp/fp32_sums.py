"""Sums of gradients over several micro-batches that are not autograd's: in fp32, on the device."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tensorstow.fsdp.module_hooks import records_of
from tensorstow.tensors.dtensor import set_gradient


class SumAside:
    """Keeps the sum of earlier backward passes out of ``.grad`` while autograd sums the next one.

    Within one backward the sum keeps the gradient's dtype, like sums of FSDP2.
    """

    def __init__(
        self,
        parameter: torch.Tensor,
        add: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
        is_aside: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> None:
        """Watch an unsharded parameter, which is trained, by two hooks of autograd's.

        ``add`` returns the sum of a gradient and the earlier sum, which ``is_aside`` tells from a
        gradient that autograd is to add to.
        """
        # Weak: the parameter's hooks hold this object.
        self._parameter = weakref.ref(parameter)
        self._add, self._is_aside = add, is_aside
        self._sum: torch.Tensor | None = None
        hooked: Any = parameter
        hooked.register_hook(self._set_aside)
        hooked.register_post_accumulate_grad_hook(self._put_back)

    def _set_aside(self, _: torch.Tensor) -> None:
        parameter = self._parameter()
        self._sum = None  # drops the sum of a backward that raised
        if parameter is None or parameter.grad is None or not self._is_aside(parameter.grad):
            return
        self._sum, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def _put_back(self, parameter: torch.Tensor) -> None:
        gradient, earlier, self._sum = parameter.grad, self._sum, None
        if gradient is not None:
            set_gradient(parameter, self._add(gradient, earlier))


def accumulate_in_fp32(parameters: Iterable[torch.Tensor]) -> None:
    """Make autograd sum the gradients of unsharded parameters over backward passes in fp32."""
    for parameter in parameters:
        if parameter.dtype != torch.float32 and parameter.requires_grad:
            SumAside(parameter, _in_fp32)


def _in_fp32(gradient: torch.Tensor, earlier: torch.Tensor | None) -> torch.Tensor:
    # float() copies a narrower sum once. A sum that is fp32 already is added to in place.
    return gradient if earlier is None else earlier.float().add_(gradient)


@torch.no_grad()
def widen_gradient(parameter: torch.Tensor) -> None:
    """Make a gradient fp32 that stays on the device; FSDP2 calls this hook of the parameter.

    FSDP2 adds the next micro-batch's gradient to it.
    """
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        set_gradient(parameter, parameter.grad.float())


def keep_averages(model: nn.Module) -> None:
    """Leave averages of 16-bit gradients over ranks in fp32, in which FSDP2 reduces them.

    It rounds them to the dtype of the parameters. So updates in backward, which take them from
    there, would have other bits than updates by ``.grad``.
    """
    groups = {id(group): group for group, _ in records_of(model.modules())}
    for group in groups.values():
        _keep_averages_of(group)


def _keep_averages_of(group: Any) -> None:  # noqa: ANN401  # FSDP2's
    decide_dtypes = group._init_mp_dtypes  # noqa: SLF001  # called before the first forward

    def decide_and_keep() -> None:
        decide_dtypes()
        narrow = [record for record in group.fsdp_params if record.orig_dtype.itemsize == 2]
        if narrow:
            group._orig_dtype = torch.float32  # noqa: SLF001
        for record in narrow:
            record.sharded_param.grad_dtype = None

    group._init_mp_dtypes = decide_and_keep  # noqa: SLF001
