"""Sums of a weight's gradients over micro-batches in vertical order, in fp32, for FSDP2.

[Note: Sums of micro-batches] Each micro-batch computes with aliases of the weights that are leaves
of their own. So a weight that is used twice in a micro-batch has one gradient from it. It is added
to a sum in fp32, which goes to ``unsharded_accumulated_grad``, where FSDP2 keeps gradients that it
has not reduced. FSDP2 reduces it in fp32 after the unit's backward, and does so after the backward
of each call. So sums of a unit that is called several times in a forward go to FSDP2 only when
autograd has passed all calls. An anchor at the input of each call makes autograd wait for them: it
returns a gradient of zeros for one of the weights.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from tensorstow.base.errors import StowError

_NARROW = (torch.bfloat16, torch.float16)
Replaced = tuple[dict[str, Any], str, torch.Tensor]
"""A module's table of parameters, a name in it, and the weight of that name."""


class WeightSum:
    """The sum of one weight's gradients over micro-batches, until FSDP2 has it."""

    def __init__(self, sharded: Any, whole: torch.Tensor, group: Any) -> None:  # noqa: ANN401
        """Watch a weight."""
        self._sharded: weakref.ref[Any] = weakref.ref(sharded)
        self._deferred: torch.Tensor | None = None
        self._backward = -1
        """The backward that computes ``_deferred``: a sum of a backward that raised is dropped."""
        hook: Any = whole.register_post_accumulate_grad_hook
        hook(self._take_over)
        if whole.dtype in _NARROW:  # FSDP2 takes gradients of one dtype, and casts to another
            sharded.sharded_param.grad_dtype = None
            if group._orig_dtype in _NARROW:  # noqa: SLF001
                group._orig_dtype = torch.float32  # noqa: SLF001
        self.anchored: list[WeightSum] = []
        """The sums that are complete when autograd reaches this weight."""

    @torch.no_grad()
    def add(self, alias: torch.Tensor, *, is_deferred: bool) -> None:
        """Take a micro-batch's gradient from an alias of the weight, whose hook this is."""
        gradient, alias.grad = alias.grad, None
        if gradient is None:
            return
        if not is_deferred:
            self._give(gradient)
            return
        backward = torch._C._current_graph_task_id()  # noqa: SLF001
        if self._deferred is None or self._backward != backward:
            self._deferred, self._backward = _wide(gradient), backward
            torch.autograd.Variable._execution_engine.queue_callback(self._check_taken)  # noqa: SLF001
        else:
            self._deferred.add_(gradient)

    @torch.no_grad()
    def _take_over(self, whole: torch.Tensor) -> None:
        """Give FSDP2 the sums, and gradients that were computed without an alias."""
        for anchored in (self, *self.anchored):
            anchored.give_deferred()
        gradient = whole.grad
        if gradient is not None and (self.anchored or gradient.dtype in _NARROW):
            whole.grad = None
            self._give(gradient)

    def _check_taken(self) -> None:
        """Raise StowError at the end of a backward that did not reach the weight."""
        if self._deferred is not None:
            self._deferred = None
            message = (
                "micro_batches: a unit that is called several times in a forward stops the gradient"
                " of its input, and gradients of its weights cannot be summed. Leave micro_batches"
                " out, or call the unit once."
            )
            raise StowError(message)

    def give_deferred(self) -> None:
        """Give FSDP2 the deferred sum of this backward."""
        total, self._deferred = self._deferred, None
        if total is not None and self._backward == torch._C._current_graph_task_id():  # noqa: SLF001
            self._give(total)

    def _give(self, gradient: torch.Tensor) -> None:
        sharded = self._sharded()
        if sharded is None:
            return
        if sharded.unsharded_accumulated_grad is None:
            sharded.unsharded_accumulated_grad = _wide(gradient)
        else:
            sharded.unsharded_accumulated_grad.add_(gradient)


class CallSums:
    """The sums of one call of a module."""

    def __init__(self) -> None:
        """Begin without weights."""
        self.by_weight: dict[int, WeightSum] = {}
        """Sums by the ``id`` of the gathered weight."""
        self.kept: list[tuple[torch.Tensor, WeightSum]] = []
        """Weights whose sums are complete only after the backward of all calls of the unit."""
        self.is_anchored = False

    def anchor(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, whose backward autograd runs before it completes the unit's sums."""
        if not self.kept:
            return x
        weight, total = min(self.kept, key=lambda pair: pair[0].numel())
        total.anchored = [other for _, other in self.kept if other is not total]
        self.is_anchored = True
        return cast("torch.Tensor", _Anchor.apply(x, weight))  # type: ignore[no-untyped-call]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def put_aliases(self, module: nn.Module) -> list[Replaced]:
        """Replace the weights of ``module`` by aliases whose gradients are added in fp32.

        Returns the replaced weights.
        """
        aliases: dict[int, torch.Tensor] = {}
        replaced: list[Replaced] = []
        for part in module.modules():
            table: dict[str, Any] = part._parameters  # noqa: SLF001
            for name, weight in table.items():
                if weight is not None and id(weight) in self.by_weight:
                    if id(weight) not in aliases:
                        aliases[id(weight)] = self._alias(weight)
                    table[name] = aliases[id(weight)]
                    replaced.append((table, name, weight))
        return replaced

    def _alias(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a leaf with the memory of ``weight``, whose gradient is added to its sum."""
        alias = weight.detach().requires_grad_()
        total = self.by_weight[id(weight)]
        is_deferred = self.is_anchored and any(total is other for _, other in self.kept)
        hook: Any = alias.register_post_accumulate_grad_hook
        hook(partial(total.add, is_deferred=is_deferred))
        return alias


class _Anchor(torch.autograd.Function):
    """Return the first argument; the second gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.shape = weight.shape
        ctx.dtype = weight.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        zero = torch.zeros((), dtype=ctx.dtype, device=gradient.device)
        return gradient, zero.expand(ctx.shape)


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.float() if gradient.dtype in _NARROW else gradient


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def put_back(replaced: Sequence[Replaced]) -> None:
    """Put the weights back that ``put_aliases`` returned."""
    for table, name, weight in replaced:
        table[name] = weight
    torch.clear_autocast_cache()  # it holds casts of aliases that are not used again
