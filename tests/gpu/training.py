"""A training whose gradients are known to the bit on any device, so weights can be compared."""

import time
from typing import Any

import torch
from torch import nn

from models import Vectors
from tensorstow import AdamW, PipelinePolicy
from tensorstow.formats.state_format import _PIECE, StateFormat
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states.layout import Family

SIZES = (70_000, 96, 3, 40_000, 1, 5_000, 30_000)
CPU = torch.device("cpu")
SMALL = PipelinePolicy(chunk_elements=1 << 14)
STEPS = 4
ENCODING = {StateFormat.BF16: 32.0, StateFormat.INT8: 44.1875}
"""Bytes for each element that is being encoded; of the others fewer than the rule takes."""


class Block(Vectors):
    """Vectors whose gradients are what they are multiplied with, exactly."""

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        terms = [(p * g).sum().float() for p, g in zip(self.parts, gradients, strict=True)]
        return torch.stack(terms).sum()


class Net(nn.Module):
    """Two blocks, as ``overlap="forward"`` waits for them."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        self.dtype = dtype
        self.blocks = nn.ModuleList(
            [Block(SIZES[:4], dtype, seed), Block(SIZES[4:], dtype, seed + 1)]
        )
        self._there: dict[int, list[torch.Tensor]] = {}

    def bring(self, steps: range) -> None:
        """Move what these steps are given to the device now: forward waits for no copy of it."""
        device = next(self.parameters()).device
        for step in steps:
            self._there[step] = [g.to(device) for g in gradients_of(step, self.dtype)]

    def forward(self, step: int) -> torch.Tensor:
        if step not in self._there:
            self.bring(range(step, step + 1))
        gradients = self._there.pop(step)
        first: torch.Tensor = self.blocks[0](gradients[:4])
        second: torch.Tensor = self.blocks[1](gradients[4:])
        return first + second


def gradients_of(step: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(n, generator=generator).to(dtype) for n in SIZES]


def spin(device: torch.device, seconds: float) -> None:
    """Give the current stream work for at least ``seconds``."""
    if device.type == "simulated":
        import simulated  # noqa: PLC0415  # registers the device

        simulated.busy(seconds)
        return
    if device.type == "cuda":
        torch.cuda._sleep(int(seconds * 3e9))
        return
    matrix = torch.ones(4096, 4096, device=device)
    start = time.monotonic()
    (matrix @ matrix).sum().item()
    once = max(time.monotonic() - start, 1e-4)
    for _ in range(int(seconds / once) + 1):
        matrix @ matrix


def make(net: nn.Module, **given: Any) -> AdamW:  # noqa: ANN401  # keywords of AdamW
    given = {"policy": SMALL, "states": "disk", "module": net, **given}
    return AdamW(net.parameters(), lr=0.01, **given)


def train(net: nn.Module, optimizer: StowedAdam, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        torch.autograd.backward(net(step))
        optimizer.step()
    optimizer.wait()


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p.detach().cpu(), q.detach().cpu()) for p, q in pairs)


def same_states(a: StowedAdam, b: StowedAdam) -> bool:
    ours, theirs = a.state_dict()["state"], b.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    return all(
        torch.equal(value.cpu(), theirs[key][name].cpu())
        for key, entry in ours.items()
        for name, value in entry.items()
    )


def temporaries(family: Family, elements: int) -> float:
    """Return the most bytes that torch's operations hold beside the states of a segment.

    The rule: 5 fp32 tensors, among them a root in fp64; or a byte more for a mask. Formats other
    than fp32: also all states in fp32, and at their end a piece of them that is encoded.
    """
    rule = (20 + family.amsgrad) * elements
    if family.format == StateFormat.FP32:
        return rule
    encoding = ENCODING.get(family.format, 0.0) * min(elements, _PIECE)
    return 4 * len(family.states) * elements + max(rule, encoding)
