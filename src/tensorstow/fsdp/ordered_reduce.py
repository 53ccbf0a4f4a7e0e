"""``ordered_reduce``: sums of gradients that do not depend on the number of ranks.

[Note: Order of micro-batches] A sum of floating-point numbers depends on its order, and a
reduce-scatter has another order on each number of ranks. So here ranks exchange the rows of their
gradients unsummed, by one all-to-all, and each rank adds those that it has received to ``.grad``,
rank 0's first, as if each were a micro-batch of one rank. Let rank ``r`` of ``n`` take the
micro-batches ``r``, ``n + r``, ``2 n + r`` and so on: then the sum is that of one rank, which takes
all of them, bit for bit. As with one rank, the sum is fp32 from the second micro-batch on.

FSDP2 adds what a reduce-scatter returns, rank 0's rows, and calls the parameter's hooks. The first
of them adds the rows of the other ranks, before any hook sees ``.grad``.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.module_hooks import ModelHook, param_groups_of
from tensorstow.tensors.dtensor import (
    OffloadedGradient,
    rows_per_rank,
    set_gradient,
    sharded_like,
)

TWICE = (
    "With ordered_reduce= the gradients of a unit were reduced twice for one forward of the model:"
    " backward went through its graph twice, or forwards of several micro-batches came before their"
    " backwards. Call backward once for each forward, before the next forward."
)
UNREDUCED = (
    "With ordered_reduce= gradients were to stay unreduced after a backward"
    " (set_requires_gradient_sync(False), or no_sync()): then micro-batches would not be added in"
    " their order. Call backward without it."
)
_OLD_TORCH = (
    "ordered_reduce= was given for weights that FSDP2 shards, and this torch's FSDP2 has no"
    " set_reduce_scatter_unused_params(): use torch 2.13, or leave it out."
)
_SUM = (
    "set_force_sum_reduction_for_comms() was called on a model with ordered_reduce=, which uses"
    " no reduction of the backend: leave it out."
)


class OrderedReductions:
    """The ordered reductions of all units of a model that FSDP2 shards over several ranks."""

    def __init__(self, *, averages: bool) -> None:
        """Begin without a model; ``averages``: divide sums by the number of ranks."""
        self._averages = averages
        self._all: list[OrderedReduceScatter] = []
        self.forwards = 0
        """Forwards with gradients of the model so far."""

    def register(self, model: nn.Module) -> None:
        """Reduce the gradients of ``model`` in order from now on; before other hooks are added."""
        model.register_forward_pre_hook(ModelHook(self._pre_forward, model))
        root: Any = model
        state = root._get_fsdp_state()  # noqa: SLF001  # nothing public does
        pre_forward = state._pre_forward  # noqa: SLF001  # torch has hooked it in before

        def pre_method(*arguments: Any) -> Any:  # noqa: ANN401  # torch's
            self._pre_forward()  # a method of register_fsdp_forward_method() calls no hooks
            return pre_forward(*arguments)

        state._pre_forward = pre_method  # noqa: SLF001
        for module in model.modules():
            if isinstance(module, FSDPModule):
                if not hasattr(module, "set_reduce_scatter_unused_params"):
                    raise OptionError(_OLD_TORCH)
                # Ranks may use other parameters: each sends rows of all.
                module.set_reduce_scatter_unused_params(True, recurse=False)
                if not self._averages:
                    module.set_gradient_divide_factor(1.0)
                self._all.append(OrderedReduceScatter(module, self))
                _refuse_unreduced(module)

    def reset(self) -> None:
        """Forget reductions that an exception ended."""
        for reduction in self._all:
            reduction.reset()

    def _pre_forward(self, *_: object) -> None:
        self.forwards += torch.is_grad_enabled()


class OrderedReduceScatter:
    """A reduce-scatter that returns rank 0's rows, and a hook that adds those of other ranks."""

    def __init__(self, module: FSDPModule, model: OrderedReductions) -> None:
        """Reduce the gradients of the parameters that FSDP2 shards for ``module``."""
        module.set_custom_reduce_scatter(self)  # type: ignore[arg-type]  # has its methods
        groups = param_groups_of(module._get_fsdp_state())  # noqa: SLF001  # the divisor is there
        self._group: Any = groups[0] if groups else None
        self._rest: torch.Tensor | None = None
        """Rows of the ranks after the first, that are not added yet: (ranks - 1, elements)."""
        self._offset = 0
        """The elements of a rank's rows that were added."""
        self._model, self._forward = model, 0
        managed = [] if self._group is None else self._group.fsdp_params
        for item in managed:
            parameter: Any = item.sharded_param
            is_trained = parameter.requires_grad
            parameter.requires_grad_(True)  # noqa: FBT003  # else torch takes no hook
            parameter.register_post_accumulate_grad_hook(self._add_rest)
            parameter.requires_grad_(is_trained)

    def allocate(
        self, size: torch.Size, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the input or the output of a reduction."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # noqa: ANN401  # torch's
        async_op: bool = False,  # noqa: FBT001, FBT002  # torch's signature
    ) -> None:
        """Exchange the rows of all ranks, and write rank 0's to ``output_tensor``, divided."""
        del async_op  # FSDP2 does not set it
        if op == dist.ReduceOp.SUM:  # then FSDP2 itself divides, rank 0's rows alone
            raise OptionError(_SUM)
        if self._forward == self._model.forwards:
            raise OptionError(TWICE)
        self._forward, self._offset = self._model.forwards, 0
        rows = torch.empty_like(input_tensor)
        dist.all_to_all_single(rows, input_tensor, group=group)
        rows.div_(self._group.gradient_divide_factor or group.size())
        first, *_ = by_rank = rows.view(group.size(), -1)
        output_tensor.copy_(first)
        self._rest = by_rank[1:]

    def reset(self) -> None:
        """Forget a reduction that an exception ended."""
        self._rest, self._forward = None, 0

    @torch.no_grad()
    def _add_rest(self, parameter: torch.Tensor) -> None:
        """Add the other ranks' rows to ``.grad``; FSDP2 comes to parameters in order."""
        gradient, rest = parameter.grad, self._rest
        if rest is None or not isinstance(gradient, DTensor):
            return
        total = gradient.to_local()
        start = self._offset
        count = parameter.shape[0]
        # FSDP2 pads the rows, so the next parameter begins after the padding.
        self._offset += rows_per_rank(count, len(rest) + 1) * parameter.numel() // max(1, count)
        # A gradient in host memory widens its sum by itself.
        if not isinstance(total, OffloadedGradient) and total.dtype != torch.float32:
            total = total.float()
            set_gradient(parameter, sharded_like(parameter, total))
        for rows in rest:
            total += rows[start : start + total.numel()].view(total.shape)
        # After the unit's last parameter the exchanged rows are freed.
        if self._offset == rest.shape[1]:
            self._rest = None


def _refuse_unreduced(module: Any) -> None:  # noqa: ANN401  # modules take any attribute
    """Make ``set_requires_gradient_sync(False)`` raise OptionError."""

    def set_reduces(reduces: bool, **options: bool) -> None:  # noqa: FBT001  # torch's
        del options
        if not reduces:
            raise OptionError(UNREDUCED)

    module.set_requires_gradient_sync = ModelHook(set_reduces)
