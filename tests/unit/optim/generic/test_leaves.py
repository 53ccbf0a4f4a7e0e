"""What a class steps in place of a sharded parameter."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from ranks.pool import Ranks
from ranks.twin import mesh_here
from tensorstow import PipelinePolicy, StowedOptimizer
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.optim.generic.leaves import leaf_of, leaf_with_gradient, own_states, sharded_states


def test_a_plain_parameter_is_its_own_leaf() -> None:
    parameter = nn.Parameter(torch.ones(3))
    entry = {"n": torch.ones(3)}
    assert leaf_of(parameter) is parameter
    assert leaf_with_gradient(parameter) is None
    assert sharded_states(entry, parameter) is entry
    assert own_states(entry, parameter, "it") == entry


def of_dtensors() -> None:
    """Step a DTensor of one rank, save it, and load it whole and as it was saved."""
    mesh = mesh_here()
    parameter = nn.Parameter(DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)]))
    scalar = nn.Parameter(DTensor.from_local(torch.ones(()), mesh, [Replicate()]))
    optimizer = StowedOptimizer(
        torch.optim.SGD, [parameter, scalar], lr=0.5, momentum=0.5, states="host"
    )
    for each in (parameter, scalar):
        each.grad = torch.full_like(each, 2.0)
    version = parameter._version
    optimizer.step()
    assert parameter._version > version or parameter.to_local()._version > version
    assert torch.equal(parameter.full_tensor(), torch.zeros(4, 2))
    assert scalar.full_tensor().item() == 0.0
    assert optimizer.grad_norm().item() == pytest.approx(6.0)
    optimizer.clip_grad_norm_(3.0)
    assert optimizer.grad_norm().item() == pytest.approx(3.0)
    assert torch.equal(optimizer.states_of(parameter)["momentum_buffer"], torch.full((4, 2), 2.0))
    saved = optimizer.state_dict()
    buffer = saved["state"][0]["momentum_buffer"]
    assert isinstance(buffer, DTensor)
    for given in (buffer * 2, buffer.full_tensor() * 2):
        saved["state"][0]["momentum_buffer"] = given
        optimizer.load_state_dict(saved)
        assert optimizer.states_of(parameter)["momentum_buffer"].unique().item() == 4.0
    with pytest.raises(OptionError, match="must not be negative"):
        optimizer.clip_grad_norm_(-1.0)
    parameter.grad.to_local()[0] = torch.nan
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    before = parameter.full_tensor()
    optimizer._step_scaled(2.0, overflowed=True)
    assert torch.equal(parameter.full_tensor(), before)
    parameter.grad_dtype = None
    parameter.grad = torch.ones_like(parameter, dtype=torch.float64)
    with pytest.raises(DTypeError, match="steps by gradients of the parameter's dtype"):
        optimizer.step()
    called: list[int] = []
    optimizer._register_close_hook(lambda: called.append(1))
    optimizer.close()
    assert called


def test_a_sharded_parameter_is_stepped_saved_and_loaded(ranks: "Ranks") -> None:
    ranks(1).run(of_dtensors)


def of_chunks() -> None:
    """Step rows in chunks on disk, as the class steps them whole; save, load, and go on."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(3)
    whole = torch.randn(301, 70)
    mine = slice(0, 151) if mesh.get_local_rank() == 0 else slice(151, 301)
    plain = nn.Parameter(whole[mine].clone())
    theirs = torch.optim.RMSprop([plain], lr=0.1, momentum=0.5, foreach=False)
    policy = PipelinePolicy(chunk_elements=1 << 12)
    parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.5, "states": "disk", "policy": policy}
    make = partial(StowedOptimizer, torch.optim.RMSprop, **options)
    ours = make([parameter])
    assert ours.plan()[0].how == "chunks"
    for step in range(3):
        gradient = torch.randn(301, 70)
        plain.grad, parameter.grad = gradient[mine], distribute_tensor(gradient, mesh, [Shard(0)])
        theirs.step()
        ours.step()
        if step == 1:
            saved = ours.state_dict()
            ours.close()
            ours = make([parameter])
            ours.load_state_dict(saved)
    assert torch.equal(parameter.to_local(), plain)
    assert torch.equal(ours.states_of(parameter)["square_avg"], theirs.state[plain]["square_avg"])
    assert ours._memory().disk_bytes
    ours.close()


def test_rows_are_stepped_in_chunks(ranks: "Ranks") -> None:
    ranks(2).run(of_chunks)
