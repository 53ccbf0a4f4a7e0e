"""Saving and loading what several ranks have: what tests call in each of them.

Gradients are set by hand, each rank's rows of a whole one, so no sum over ranks rounds.
"""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from tensorstow import AdamW, PipelinePolicy, StowError
from tensorstow.checkpoint import full_state

Facts = dict[str, torch.Tensor]
SMALL = PipelinePolicy(chunk_elements=1024, backend="threads", depth=4)


def make_model(dtype: torch.dtype, *, sharded: bool) -> nn.Module:
    """Return the model: rows that no number of ranks divides, fewer than ranks in the last."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(12, 67), nn.Tanh(), nn.Linear(67, 3)).to(dtype)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def make_optimizer(model: nn.Module, states: str) -> AdamW:
    """Return ours; what is on disk is gathered into a mapped file."""
    full_state.RAM_BYTES = -1
    return AdamW(model.parameters(), lr=0.01, states=states, policy=SMALL)  # type: ignore[arg-type]


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Update by gradients that are the same whole ones in every world."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            whole = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.grad = whole
        optimizer.step()


def facts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Facts:
    """Return weights and states, whole."""
    saved = optimizer.state_dict()
    found = {f"{n}.weight": p for n, p in enumerate(model.parameters())}
    for number, entry in saved["state"].items():
        found |= {f"{number}.{name}": value for name, value in entry.items()}
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in found.items()}


def alone(dtype: torch.dtype, steps: int) -> Facts:
    """Return what a process has that shards nothing, in RAM."""
    model = make_model(dtype, sharded=False)
    optimizer = make_optimizer(model, "ram")
    take_steps(model, optimizer, range(steps))
    return {name: value.detach().clone() for name, value in facts_of(model, optimizer).items()}


def differing(found: Facts, wanted: Facts) -> list[str]:
    """Return the names of what is not the same."""
    both = found.keys() & wanted.keys()
    return sorted(
        (found.keys() ^ wanted.keys()) | {n for n in both if not same(found[n], wanted[n])}
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same bits."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())


def kinds(dtype: torch.dtype, states: str) -> list[str]:
    """Return what is wrong with the kinds of tensors in ``state_dict``, and with their values."""
    model = make_model(dtype, sharded=True)
    optimizer = make_optimizer(model, states)
    take_steps(model, optimizer, range(2))
    wrong = differing(facts_of(model, optimizer), alone(dtype, 2))
    saved = optimizer.state_dict()["state"]
    for number, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, DTensor)
        for name, value in saved[number].items():
            if name == "step":
                wrong += [] if type(value) is torch.Tensor else [name]
            elif (value.shape, value.device_mesh, value.placements, value.dtype) != (
                parameter.shape,
                parameter.device_mesh,
                parameter.placements,
                torch.float32,
            ):
                wrong.append(f"{number}.{name}: {value}")
    optimizer.close()
    return wrong


def save(directory: Path, dtype: torch.dtype, states: str) -> None:
    """Train three steps and save by torch.distributed.checkpoint."""
    model = make_model(dtype, sharded=True)
    optimizer = make_optimizer(model, states)
    take_steps(model, optimizer, range(3))
    weights, saved = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": saved}, checkpoint_id=directory)
    optimizer.close()


def load(directory: Path, dtype: torch.dtype, states: str, sharded: bool) -> list[list[str]]:  # noqa: FBT001
    """Load what `save` saved, and go on; return what is wrong at both ends."""
    model = make_model(dtype, sharded=sharded)
    optimizer = make_optimizer(model, states)
    weights, saved = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": saved}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=saved)
    wrong = [differing(facts_of(model, optimizer), alone(dtype, 3))]
    take_steps(model, optimizer, range(3, 6))
    wrong.append(differing(facts_of(model, optimizer), alone(dtype, 6)))
    optimizer.close()
    return wrong


def whole_and_back(dtype: torch.dtype, states: str) -> list[list[str]]:
    """Gather the whole states on rank 0 alone, and load them everywhere."""
    model = make_model(dtype, sharded=True)
    optimizer = make_optimizer(model, states)
    take_steps(model, optimizer, range(3))
    ways = StateDictOptions(full_state_dict=True, cpu_offload=True)
    saved: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=ways)
    model.zero_grad()
    optimizer.close()  # a parameter has one optimizer
    fresh = make_optimizer(model, states)
    ways = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, fresh, saved, options=ways)
    wrong = [differing(facts_of(model, fresh), alone(dtype, 3))]
    take_steps(model, fresh, range(3, 6))
    wrong.append(differing(facts_of(model, fresh), alone(dtype, 6)))
    return wrong


def loaded_by(
    how: str, make: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> list[list[str]]:
    """Load states that are whole, or sharded in another way, or torch's; go on."""
    reference = make_model(dtype, sharded=False)
    theirs = make(reference.parameters(), lr=0.01)
    take_steps(reference, theirs, range(3))
    saved = copy.deepcopy(theirs.state_dict())
    model = make_model(dtype, sharded=True)
    take_weights(model, list(reference.parameters()))
    if how != "whole":
        mesh = next(model.parameters()).device_mesh  # type: ignore[attr-defined]
        for entry in saved["state"].values():
            for name in sorted(entry.keys() - {"step"}):
                entry[name] = distribute_tensor(entry[name], mesh)  # replicated
    optimizer = make_optimizer(model, "disk")
    optimizer.load_state_dict(saved)
    take_steps(reference, theirs, range(3, 5))
    take_steps(model, optimizer, range(3, 5))
    if make is AdamW:
        return [differing(facts_of(model, optimizer), facts_of(reference, theirs))]
    again = make(model.parameters(), lr=0.01)
    again.load_state_dict(optimizer.state_dict())
    return [differing(facts_of(model, again), facts_of(model, optimizer))]


@torch.no_grad()
def take_weights(model: nn.Module, weights: list[torch.Tensor]) -> None:
    """Give a sharded model whole weights."""
    for parameter, value in zip(model.parameters(), weights, strict=True):
        assert isinstance(parameter, DTensor)
        there = distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements)
        parameter.copy_(there)


def refused(what: str, directory: Path) -> str:
    """Return what a rank is told that asks for what does not work."""
    model = make_model(torch.float32, sharded=True)
    optimizer = make_optimizer(model, "disk")
    take_steps(model, optimizer, range(1))
    try:
        if what == "save_safetensors":
            optimizer.save_safetensors(directory / "states.safetensors")
        else:
            other = init_device_mesh("cpu", (1, dist.get_world_size()))
            saved = optimizer.state_dict()
            for entry in saved["state"].values():
                entry["exp_avg"] = distribute_tensor(torch.ones(entry["exp_avg"].shape), other)
            optimizer.load_state_dict(saved)
    except StowError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def from_safetensors(path: Path, dtype: torch.dtype) -> list[str]:
    """Load the one file of a process that shards nothing."""
    model = make_model(dtype, sharded=True)
    wanted = alone(dtype, 3)
    take_weights(model, [value for name, value in wanted.items() if name.endswith("weight")])
    optimizer = make_optimizer(model, "disk")
    optimizer.load_safetensors(path)
    return differing(facts_of(model, optimizer), wanted)
