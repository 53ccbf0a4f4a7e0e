"""Where an accelerator computes, updates have all cores but one, and chunks of their own size."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from training import Net, make, train

from models import ResidualStack
from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.fsdp.sharding import make_mesh

THREADS = PipelinePolicy(threads=16)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_weights_on_the_device(device: torch.device, overlap: str) -> None:
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, states="ram", overlap=overlap, policy=THREADS)
    train(net, optimizer, 0, 2)
    assert optimizer._params().store.pipeline.counters.update_lane == "update (15 threads)"


@pytest.mark.parametrize(("states", "chunks"), [("host", 1), ("disk", 2)])
def test_chunks_that_python_sends_are_large(device: torch.device, states: str, chunks: int) -> None:
    """Each costs as much Python as the update of a quarter of it by sixteen cores."""
    weight = nn.Parameter(torch.zeros(700_000, device=device))
    optimizer = AdamW([weight], lr=1e-2, states=states)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert len(optimizer._params().store.chunks) == chunks


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_weights_in_host_memory(device: torch.device, overlap: str) -> None:
    model = ResidualStack(16, 3)
    model, optimizer = stow(
        model,
        partial(AdamW, lr=1e-2, policy=THREADS),
        plan=Plan(parameters="host", overlap=overlap),
    )
    for _ in range(2):
        model(torch.ones(2, 16, device=device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    assert optimizer._params().store.pipeline.counters.update_lane == "update (15 threads)"


def test_weights_that_fsdp2_keeps_in_host_memory(device: torch.device) -> None:
    model = ResidualStack(16, 2)
    mesh = make_mesh(device, stage=3, replicas=1)
    fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    optimizer = AdamW(model.parameters(), lr=1e-2, policy=THREADS, overlap="backward", module=model)
    model(torch.ones(2, 16, device=device)).sum().backward()
    optimizer.step()
    assert next(model.parameters()).is_cpu
    assert optimizer._params().store.pipeline.counters.update_lane == "update (15 threads)"
