"""The report: bytes that parameters hold and have moved, padding included."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import tensorstow
from ranks.pool import Ranks
from ranks.twin import ADAMW, mesh_here
from tensorstow import Plan
from tensorstow.fsdp.report import ParameterBytes, parameter_bytes

Pool = Callable[[int], Ranks]
PAGE = 4096
LAYERS, ROWS, COLUMNS = 5, 33, 96
NOTHING = ParameterBytes(*(0 for _ in fields(ParameterBytes)))


def reported(plan: Plan) -> tuple[ParameterBytes, ParameterBytes]:
    """Return the report of a stowed model before it is used, and behind a forward."""
    layers = (nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(LAYERS))
    model = nn.Sequential(*(nn.Sequential(layer) for layer in layers))
    model, optimizer = tensorstow.stow(model, ADAMW, plan=plan, mesh=mesh_here())
    before = parameter_bytes(model)
    with torch.no_grad():
        for layer in model:
            layer(torch.ones(1, COLUMNS))
    after = parameter_bytes(model)
    optimizer.close()
    return before, after


@pytest.mark.parametrize(("world", "rows"), [(1, 33), (2, 17)])
def test_parameters_in_host_memory_are_counted_with_their_padding(
    ranks: Pool, world: int, rows: int
) -> None:
    held = LAYERS * rows * COLUMNS * 4
    before = replace(NOTHING, host_bytes=held)
    # One rank computes with the weights themselves; several gather each once in a forward.
    after = replace(before, link_bytes_up=held if world > 1 else 0)
    assert ranks(world).run(reported, Plan()) == [(before, after)] * world


@pytest.mark.parametrize(("world", "rows"), [(1, 33), (2, 17)])
def test_parameters_on_disk_are_pinned_and_read(ranks: Pool, world: int, rows: int) -> None:
    shard = rows * COLUMNS * 4
    nbytes = -(-shard // PAGE) * PAGE
    plan = Plan(parameters="disk", prefetch=0, buffer_pool_bytes=3 * (nbytes + PAGE))
    for before, after in ranks(world).run(reported, plan):
        assert (after.host_bytes, after.disk_bytes) == (0, LAYERS * shard)
        assert before.bytes_written == after.bytes_written == LAYERS * nbytes
        assert 0 < after.buffer_pool_bytes <= after.most_buffer_pool_bytes <= 3 * (nbytes + PAGE)
        # Those in memory are the last ones: every forward begins with others.
        assert after.bytes_read - before.bytes_read == LAYERS * nbytes


def test_a_model_that_is_not_stowed_holds_nothing() -> None:
    assert parameter_bytes(nn.Linear(2, 2)) == NOTHING
