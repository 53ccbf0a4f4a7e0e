"""Other projects' ways to train a model on a device with states on the host."""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from benchmarks.accelerator.ways import LR, Site, Training, Way, nothing, trained
from tensorstow.fsdp.sharding import make_mesh

_HALVES_DRAM = 14
"""bf16 weight, m and v read and written, the gradient read."""
_WHOLE_DRAM = 34
"""fp32 master, m and v read and written, an fp32 gradient read; then the cast to bf16."""


def _fsdp(site: Site, model: nn.Module) -> Training:
    """FSDP2's own offload; weights stay gathered from forward to backward, which is the faster."""
    mesh = make_mesh(site.place.device, stage=3, replicas=1)
    policy = CPUOffloadPolicy(pin_memory=site.place.is_real)
    blocks: Any = model.get_submodule("blocks")
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, offload_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    return Training(trained(model, optimizer), site.place.wait, nothing)


def _torchao(site: Site, model: nn.Module) -> Training:
    offload: Any = importlib.import_module("torchao.optim").CPUOffloadOptimizer
    model = site.place.put(model)
    optimizer = offload(model.parameters(), torch.optim.AdamW, lr=LR, fused=True)
    return Training(trained(model, optimizer), site.place.wait, nothing)


def _deepspeed(site: Site, model: nn.Module) -> Training:
    """ZeRO-2 with the optimizer on the CPU: parameters on DEVICE, states on HOST."""
    deepspeed: Any = importlib.import_module("deepspeed")
    make_mesh(site.place.device, stage=3, replicas=1)  # the group that it would start by itself
    os.environ.setdefault("LOCAL_RANK", str(site.place.device.index or 0))
    config = {
        "train_micro_batch_size_per_gpu": site.sequences,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 1e-2}},
    }
    made = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine = made[0]

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(ids)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Training(step, site.place.wait, engine.destroy)


def _peer(
    name: str, make: Callable[[Site, nn.Module], Training], dram_bytes: int, host_bytes: int
) -> Way:
    """Return a way; ``host_bytes``: pinned memory of torch's is rounded up to powers of two."""
    return Way(name, make, dram_bytes, may_fail=True, host_bytes=host_bytes)


PEERS = (
    _peer("FSDP2 CPUOffloadPolicy", _fsdp, _HALVES_DRAM, host_bytes=12),
    _peer("torchao CPUOffloadOptimizer", _torchao, _HALVES_DRAM, host_bytes=12),
    _peer("DeepSpeed ZeRO-2, optimizer on the CPU", _deepspeed, _WHOLE_DRAM, host_bytes=20),
)
