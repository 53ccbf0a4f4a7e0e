"""A model that is stowed and its twin that is whole, trained side by side in every rank."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import tensorstow
from tensorstow import Plan
from tensorstow.fsdp.sharding import current_device

Loss = Callable[[nn.Module, int, int], torch.Tensor]
"""The loss of a model on what a rank sees in a micro-batch."""
ADAMW = partial(tensorstow.AdamW, lr=1e-2)
FETCHED = Plan(parameters="disk", states="disk")
"""Everything on disk."""
FETCHED_BESIDE = FETCHED.but(overlap="forward")
"""The same, updated beside the next forward."""


def mesh_here() -> DeviceMesh | None:
    """Return a mesh of one rank where there is one, so that it is sharded too."""
    return init_device_mesh(current_device().type, (1,)) if dist.get_world_size() == 1 else None


def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """Return all ranks' elements together, as a copy."""
    if tensor is None:
        return None
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def weights_of(module: nn.Module) -> list[torch.Tensor]:
    """Return copies of whole weights."""
    return [whole(parameter) for parameter in module.parameters()]


class Twins:
    """The same model twice: ``stowed`` over the ranks, and ``alone``, which sees all ranks' data.

    The one alone has the mean of the ranks' gradients, summed in rank order, and several
    micro-batches' in fp32: what the stowed one is to have, to the bit.
    """

    def __init__(
        self,
        make: Callable[[], nn.Module],
        loss: Loss,
        plan: Plan | None = None,
        optimizer: Callable[..., Any] = ADAMW,
        **options: Any,  # noqa: ANN401  # stow's
    ) -> None:
        """Make both."""
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.loss = loss
        mesh = options.pop("mesh", None) or mesh_here()
        self.stowed, self.ours = tensorstow.stow(
            make(), optimizer, plan=plan or Plan(), mesh=mesh, **options
        )
        self.alone = make()
        self.theirs = optimizer(list(self.alone.named_parameters()))
        for parameter in self.alone.parameters():
            if parameter.is_floating_point():
                parameter.grad_dtype = None

    def each(self, act: Callable[[nn.Module, Any], Any]) -> tuple[Any, Any]:
        """Do the same to both; return what it returned."""
        return act(self.stowed, self.ours), act(self.alone, self.theirs)

    def backward(
        self, batch: int, scale: Callable[[torch.Tensor], torch.Tensor] | None = None
    ) -> None:
        """Let both have one more micro-batch's gradients."""
        scale = scale or (lambda loss: loss)
        scale(self.loss(self.stowed, self.rank, batch)).backward()
        kept = [p.grad for p in self.alone.parameters()]
        sums: list[torch.Tensor | None] = [None] * len(kept)
        for rank in range(self.world):
            self._drop()
            scale(self.loss(self.alone, rank, batch)).backward()
            sums = [_add(s, p.grad) for s, p in zip(sums, self.alone.parameters(), strict=True)]
        for parameter, total, before in zip(self.alone.parameters(), sums, kept, strict=True):
            mean = None if total is None else (total / self.world).to(parameter.dtype)
            parameter.grad = (
                before if mean is None else mean if before is None else before.float() + mean
            )

    def _drop(self) -> None:
        for parameter in self.alone.parameters():
            parameter.grad = None

    def step(self) -> None:
        """Update both, and drop gradients."""
        self.each(lambda _, optimizer: (optimizer.step(), optimizer.zero_grad()))

    def train(self, steps: Iterable[int] = range(2)) -> None:
        """Take steps of one micro-batch each."""
        for step in steps:
            self.backward(step)
            self.step()

    def compare(self) -> None:
        """Raise AssertionError unless all weights are the same to the bit."""
        self.ours.wait()
        pairs = zip(self.stowed.named_parameters(), self.alone.parameters(), strict=True)
        for (name, ours), theirs in pairs:
            assert torch.equal(whole(ours), theirs), name

    def compare_gradients(self) -> None:
        """Raise AssertionError unless all gradients are the same to the bit."""
        pairs = zip(self.stowed.named_parameters(), self.alone.parameters(), strict=True)
        for (name, ours), theirs in pairs:
            mine = whole(ours.grad)
            assert (mine is None) == (theirs.grad is None), name
            assert mine is None or torch.equal(mine.float(), theirs.grad.float()), name

    def close(self) -> None:
        """Compare, and end both."""
        self.compare()
        self.ours.close()
        self.theirs.close()


def _add(total: torch.Tensor | None, more: torch.Tensor | None) -> torch.Tensor | None:
    if more is None:
        return total
    return more if total is None else total + more
