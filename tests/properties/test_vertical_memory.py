"""What vertical order holds: buffers of weights, saved activations and sums, in closed forms."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from models import FeedForward
from tensorstow import AdamW, Plan, stow
from tensorstow.activations.pool import ActivationBytes
from tensorstow.base.sizes import round_up
from tensorstow.fsdp.placed_activations import PlacedActivations
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.io.files import ALIGN

WIDTH, ROWS, BATCH, BLOCKS, STEPS = 128, 64, 8, 7, 2
INPUT = 4 * BATCH * ROWS * WIDTH
"""Bytes of a block's input, of the whole batch. It saves that, a norm of it, and two of four times
its width."""
SCRATCH = partial(AdamW, lr=1e-2, durability="none")


def trained(directory: Path, **given: object) -> tuple[nn.Module, ActivationBytes]:
    """Return the model, and what its activations held and moved in one step."""
    torch.manual_seed(0)
    net = nn.Sequential(*(FeedForward(WIDTH) for _ in range(BLOCKS)))
    plan = Plan("disk", activations="disk", overlap="backward", **given)
    model, optimizer = stow(net, SCRATCH, plan=plan, dir=directory)
    with optimizer:
        for _ in range(STEPS):
            model(torch.ones(BATCH, ROWS, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        (part,) = [p for p in optimizer._parts() if isinstance(p, PlacedActivations)]
        return model, part.nbytes()[0]


UNIT = 4 * (2 * WIDTH + 8 * WIDTH * WIDTH + 5 * WIDTH)
"""Bytes of a block's weights."""
IN_MEMORY = 5
"""Units: one that is computed with, two that are updated and written, and two read ahead."""


@pytest.mark.parametrize("count", [1, 8])
def test_each_saved_byte_is_moved_once_and_few_are_in_memory(tmp_path: Path, count: int) -> None:
    model, moved = trained(tmp_path, micro_batches=count, activation_ram_budget=0)
    assert moved.bytes_written == moved.bytes_read == STEPS * BLOCKS * 10 * INPUT
    # A unit's input, which all its micro-batches have views of, and the widest of one of them.
    wide = 4 * INPUT // count
    assert moved.most_host_bytes == (wide if count == 1 else INPUT + wide)
    assert parameter_bytes(model).most_buffer_pool_bytes == IN_MEMORY * round_up(UNIT, ALIGN)


def test_activations_take_their_budget_and_no_more(tmp_path: Path) -> None:
    budget = 4 * INPUT
    _, moved = trained(tmp_path, micro_batches=8, activation_ram_budget=budget)
    assert budget - INPUT < moved.most_host_bytes <= budget
    # The newest half of it is not written when backward begins.
    written = STEPS * (BLOCKS * 10 * INPUT - budget // 2)
    assert written <= moved.bytes_written < written + STEPS * INPUT
    assert moved.bytes_read <= moved.bytes_written
