"""Gradients that FSDP2 has reduced: they leave the device, and are summed in host memory.

[Note: Sums] The first micro-batch's gradient keeps its dtype; with the second the sum becomes fp32,
so that a bf16 sum does not lose what comes late. FSDP2 adds to ``.grad`` of a parameter's shard, so
what stands there is told of every micro-batch and adds in host memory.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

_ADD = torch.ops.aten.add_.Tensor


class HostGradient(torch.Tensor):
    """A shard's gradient, whose elements are ``landed`` in host memory.

    Operations run there, so that norms, clipping and unscaling act on what the update will use.
    """

    landed: torch.Tensor

    @staticmethod
    def __new__(cls: type[Self], like: torch.Tensor, landed: torch.Tensor) -> Self:
        """Stand in for ``like``, a gradient on the device."""
        tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        tensor.landed = landed
        return tensor

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
        first = args[0]
        if func == _ADD and isinstance(first, cls) and args[1].is_floating_point():
            first.more(args[1], **(kwargs or {}))
            return first
        device = next(g.device for g in _gradients((args, kwargs)))
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def landed(value: Any) -> Any:  # noqa: ANN401
            if isinstance(value, cls):
                return value.landed
            if not isinstance(value, torch.Tensor) or value.is_cpu:
                return value
            copies.append((value, value.cpu()))
            return copies[-1][1]

        out = func(*tree_map(landed, args), **tree_map(landed, kwargs or {}))
        if func._schema.is_mutable:  # noqa: SLF001
            for original, copy in copies:  # found_inf, of what GradScaler calls
                original.copy_(copy)
            return first
        return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, out)

    def more(self, other: torch.Tensor, alpha: float = 1.0) -> None:
        """Add a micro-batch's gradient."""
        if self.landed.dtype != torch.float32:
            self.landed = self.landed.float()
        more = other.landed if isinstance(other, HostGradient) else other.to(self.landed.device)
        self.landed.add_(more, alpha=alpha)


def _gradients(tree: Any) -> Sequence[HostGradient]:  # noqa: ANN401
    found: list[HostGradient] = []
    tree_map(lambda v: found.append(v) if isinstance(v, HostGradient) else None, tree)
    return found


@torch.no_grad()
def take_down(parameter: torch.Tensor) -> None:
    """Let the gradient of a sharded ``parameter`` leave the device: its hook, called by FSDP2."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    local = gradient.to_local()
    if isinstance(local, HostGradient):
        return
    landed = local.cpu() if not local.is_cpu else local
    gradient._local_tensor = HostGradient(local, landed)  # noqa: SLF001
