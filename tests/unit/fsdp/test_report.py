"""The report: bytes that parameters hold and have moved, padding included."""

from dataclasses import fields, replace

import pytest
import torch
from torch import nn

import tensorstow
from ranks.pool import Pool
from ranks.twin import ADAMW, mesh_here
from tensorstow import Plan
from tensorstow.fsdp.report import ParameterBytes, parameter_bytes

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
    plan = Plan(parameters="disk", prefetch=0, weight_ram_budget=3 * (nbytes + PAGE))
    for before, after in ranks(world).run(reported, plan):
        assert (after.host_bytes, after.disk_bytes) == (0, LAYERS * shard)
        assert before.bytes_written == after.bytes_written == LAYERS * nbytes
        assert 0 < after.buffer_pool_bytes <= after.most_buffer_pool_bytes <= 3 * (nbytes + PAGE)
        # Those in memory are the last ones: every forward begins with others.
        assert after.bytes_read - before.bytes_read == LAYERS * nbytes


@pytest.mark.parametrize("placed", [False, True])
def test_plain_parameters_are_counted_where_they_are(*, placed: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2, device="meta"))
    if placed:
        model, optimizer = tensorstow.stow(model[:1], ADAMW, plan=Plan())
        optimizer.close()
    assert parameter_bytes(model) == replace(NOTHING, host_bytes=(8 * 4 + 4) * 4)


def test_plain_parameters_on_an_accelerator_are_counted_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2))
    there = model[0].weight
    monkeypatch.setattr(type(there), "is_cpu", property(lambda self: self is not there))
    held = replace(NOTHING, host_bytes=(4 * 2 + 2) * 4, device_parameter_bytes=8 * 4 * 4)
    assert parameter_bytes(model) == held


def whole_on_each_rank() -> ParameterBytes:
    model, optimizer = tensorstow.stow(nn.Linear(8, 4, bias=False), ADAMW, plan=Plan(stage=2))
    optimizer.close()
    return parameter_bytes(model)


def test_parameters_that_each_rank_has_whole_are_counted_whole(ranks: Pool) -> None:
    held = replace(NOTHING, host_bytes=8 * 4 * 4)
    assert ranks(2).run(whole_on_each_rank) == [held] * 2
