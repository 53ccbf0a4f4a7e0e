"""A gradient on the device whose elements are in host memory: the tensor in ``.grad``."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_map

from tensorstow.fsdp.d2h_queue import HostSum

_ADD = torch.ops.aten.add_.Tensor
_ALIASES = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})


class HostGradient(torch.Tensor):
    """A gradient of the device's shape, dtype and device, with its elements in host memory.

    Operations run there, so that norms, clipping and unscaling act on what the update will use.
    """

    host: HostSum
    """Its elements; aliases of this tensor share them."""
    uncounted: int
    """Bytes that were copied from the device and that no counter has yet."""

    @staticmethod
    def __new__(
        cls: type[Self], like: torch.Tensor, host: HostSum, dtype: torch.dtype | None = None
    ) -> Self:
        """Stand in for ``like``, with the elements of ``host``; ``dtype`` None: in its own."""
        tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, dtype=dtype or like.dtype, device=like.device
        )
        tensor.host, tensor.uncounted = host, 0
        return tensor

    @property
    def landed(self) -> torch.Tensor:
        """The elements in host memory, waited for while they are being copied."""
        return self.host.landed

    @property
    def fall_mark(self) -> HostSum:
        """The end of the copies, behind which ``room`` has the elements."""
        return self.host

    @property
    def room(self) -> torch.Tensor:
        """The memory of ``landed``, not waited for."""
        return self.host.elements

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the elements as text."""
        return f"HostGradient({self.landed!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run ``func`` on the elements in host memory; results are on the gradient's device."""
        named = kwargs or {}
        first = args[0]
        if isinstance(first, cls) and func in _ALIASES:
            return cls(first, first.host)
        if isinstance(first, cls) and func == _ADD and _is_micro_batch(first, args[1]):
            first.accumulate(args[1], **named)
            return first
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def on_host(value: Any) -> Any:  # noqa: ANN401
            if isinstance(value, cls):
                return value.landed
            if not isinstance(value, torch.Tensor) or value.is_cpu:
                return value
            copies.append((value, value.cpu()))
            return copies[-1][1]

        out = func(*tree_map(on_host, args), **tree_map(on_host, named))
        if func._schema.is_mutable:  # noqa: SLF001
            for original, copy in copies:  # found_inf, of what GradScaler calls
                original.copy_(copy)
            return _mutated_result(func, args, named)
        device = next(g.device for g in _gradients((args, named)))
        return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, out)

    def accumulate(self, other: torch.Tensor, alpha: float = 1.0) -> None:
        """Add a later micro-batch's gradient, times ``alpha``, in fp32."""
        if isinstance(other, HostGradient):
            self.host.add_on_host(other.landed, alpha)
        else:
            self.host.add(other, alpha)
            self.uncounted += other.nbytes


def _is_micro_batch(total: HostGradient, other: object) -> bool:
    """Return whether FSDP2 adds what backward has just made, and not a user something else."""
    return (
        isinstance(other, torch.Tensor)
        and other.shape == total.shape
        and torch._C._current_graph_task_id() != -1  # noqa: SLF001  # as FSDP2 asks
    )


def _mutated_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return what ``func``, which has written to one of these, is to return."""
    if not func._schema.returns:  # noqa: SLF001  # of lists
        return None
    return kwargs.get("out", args[0])


def _gradients(tree: Any) -> Sequence[HostGradient]:  # noqa: ANN401
    found: list[HostGradient] = []
    tree_map(lambda v: found.append(v) if isinstance(v, HostGradient) else None, tree)
    return found
