"""Gradients that FSDP2 has reduced, as tensors whose elements are in host memory."""

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from tensorstow.fsdp.gradient_copies import HostSum

_ADD = torch.ops.aten.add_.Tensor
_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class HostGradient(torch.Tensor):
    """A shard's gradient, whose elements are ``landed`` in host memory.

    Operations run there, so that norms, clipping and unscaling act on what the update will use.
    """

    host: HostSum
    """Its elements; views of this have the same."""
    uncounted: int
    """Bytes that have come from the device and that no counter has."""

    @staticmethod
    def __new__(
        cls: type[Self], like: torch.Tensor, host: HostSum, dtype: torch.dtype | None = None
    ) -> Self:
        """Stand in for ``like``, a gradient on the device; ``dtype`` None: in its own."""
        tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, dtype=dtype or like.dtype, device=like.device
        )
        tensor.host, tensor.uncounted = host, 0
        return tensor

    @property
    def landed(self) -> torch.Tensor:
        """The elements, in host memory; waited for where they are still on their way."""
        return self.host.landed

    @property
    def fall_mark(self) -> HostSum:
        """Behind which ``room`` has the elements."""
        return self.host

    @property
    def room(self) -> torch.Tensor:
        """What ``landed`` will be, not waited for."""
        return self.host.elements

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is."""
        return f"HostGradient({self.landed!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run ``func`` on the landed elements; results are on the gradient's device."""
        named = kwargs or {}
        first = args[0]
        if isinstance(first, cls) and func in _SAME:
            return cls(first, first.host)
        if isinstance(first, cls) and func == _ADD and _is_micro_batch(first, args[1]):
            first.more(args[1], **named)
            return first
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def landed(value: Any) -> Any:  # noqa: ANN401
            if isinstance(value, cls):
                return value.landed
            if not isinstance(value, torch.Tensor) or value.is_cpu:
                return value
            copies.append((value, value.cpu()))
            return copies[-1][1]

        out = func(*tree_map(landed, args), **tree_map(landed, named))
        if func._schema.is_mutable:  # noqa: SLF001
            for original, copy in copies:  # found_inf, of what GradScaler calls
                original.copy_(copy)
            return _changed(func, args, named)
        device = next(g.device for g in _gradients((args, named)))
        return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, out)

    def more(self, other: torch.Tensor, alpha: float = 1.0) -> None:
        """Add a micro-batch's gradient."""
        if isinstance(other, HostGradient):
            self.host.add_here(other.landed, alpha)
        else:
            self.host.add(other, alpha)
            self.uncounted += other.nbytes


def _is_micro_batch(sum_: HostGradient, other: object) -> bool:
    """Return whether FSDP2 adds what backward has just made, and not a user something else."""
    return (
        isinstance(other, torch.Tensor)
        and other.shape == sum_.shape
        and torch._C._current_graph_task_id() != -1  # noqa: SLF001  # as FSDP2 asks
    )


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return what ``func``, which has written to one of these, is to return."""
    if not func._schema.returns:  # noqa: SLF001  # of lists
        return None
    return kwargs.get("out", args[0])


def _gradients(tree: Any) -> Sequence[HostGradient]:  # noqa: ANN401
    found: list[HostGradient] = []
    tree_map(lambda v: found.append(v) if isinstance(v, HostGradient) else None, tree)
    return found


def sum_wide(parameters: Iterable[torch.Tensor]) -> None:
    """Let autograd's sums over backward passes be fp32 where nothing is sharded, as those here are.

    Within one backward they keep the gradient's dtype, as FSDP2's do.
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
    known: "weakref.ref[torch.Tensor]", sums: dict[str, torch.Tensor], gradient: torch.Tensor
) -> None:
    parameter = known()
    if parameter is not None and parameter.grad is not None:
        sums["wide"] = parameter.grad.float().add_(gradient)
        parameter.grad = None


@torch.no_grad()
def _put_back(sums: dict[str, torch.Tensor], parameter: torch.Tensor) -> None:
    if "wide" in sums:
        parameter.grad_dtype = None
        parameter.grad = sums.pop("wide")


@torch.no_grad()
def widen(parameter: torch.Tensor) -> None:
    """Let the gradient of a sharded parameter on the device be fp32, as a sum of several is to be.

    A hook, called by FSDP2, which then adds the next micro-batch's to it.
    """
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        wide = parameter.grad.float()
        parameter.grad_dtype = None
        parameter.grad = wide
