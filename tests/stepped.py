"""Vectors that an optimizer steps, in chunks of which they fill several."""

from typing import Any

import pytest
import torch

from models import Vectors
from remote import make_remote
from tensorstow import AdamW, PipelinePolicy
from tensorstow.optim.stowed_adam import StowedAdam

CHUNK = 1024
SMALL = PipelinePolicy(chunk_elements=CHUNK)
SIZES = (3000, 10, 500, 1, 5000, 700)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
TIGHT = 96 << 10
"""Bytes of two slots of the ring: chunks come back to where others are."""


def make(net: Vectors, **given: Any) -> AdamW:  # noqa: ANN401  # keywords of AdamW
    given = {"policy": SMALL, "states": "disk", **given}
    return AdamW(net.parameters(), lr=0.01, module=net, **given)


def make_away(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype = torch.float32,
    **given: Any,  # noqa: ANN401  # keywords of AdamW
) -> tuple[Vectors, AdamW]:
    """Return vectors that count as an accelerator's, and their optimizer."""
    make_remote(monkeypatch)
    net = Vectors(SIZES, dtype)
    return net, make(net, **given)


def train(net: Vectors, optimizer: StowedAdam, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(net())
        optimizer.step()


def same(a: Vectors, b: Vectors) -> bool:
    return all(map(torch.equal, a.parameters(), b.parameters()))


def same_states(a: StowedAdam, b: StowedAdam) -> bool:
    ours, theirs = a.state_dict()["state"], b.state_dict()["state"]
    return ours.keys() == theirs.keys() and all(
        torch.equal(value, theirs[key][name])
        for key, entry in ours.items()
        for name, value in entry.items()
    )
