"""Whole matrices between ranks: what is sent, and what a matrix refuses."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ranks.owned import full
from ranks.pool import Ranks
from tensorstow.base.errors import OptionError
from tensorstow.optim.generic.exchange import OwnedMatrix, gather, scatter, spread


def there_and_back(dim: int) -> None:
    """Gather matrices of several dtypes at two owners, change them, and send them back."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (ranks,))
    group = mesh.get_group()
    matrices, wholes = [], []
    for owner, dtype in ((1, torch.float32), (0, torch.bfloat16), (1, torch.float64)):
        whole = torch.arange(35.0).view(5, 7).to(dtype) + owner
        parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)]))
        parameter.grad = distribute_tensor(whole * 2, mesh, [Shard(dim)])
        matrices.append(OwnedMatrix(parameter, whole.shape, dtype, group, dim, owner))
        wholes.append(whole)
    matrices[2].parameter.grad = None
    leaves = gather(matrices)
    expected = [w for m, w in zip(matrices, wholes, strict=True) if m.owner == rank]
    assert all(map(torch.equal, leaves, expected))
    gradients = [leaf.grad for leaf in leaves]
    assert [g is None for g in gradients] == {0: [False], 1: [False, True]}.get(rank, [])
    assert all(g is None or torch.equal(g, 2 * w) for g, w in zip(gradients, expected, strict=True))
    with torch.no_grad():
        for leaf in leaves:
            leaf.mul_(3)
    scatter(matrices, leaves)
    for matrix, whole in zip(matrices, wholes, strict=True):
        assert torch.equal(matrix.parameter.full_tensor(), 3 * whole)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_gathered_is_whole_and_what_comes_back_is_cut(
    ranks: "Ranks", dim: int, world: int
) -> None:
    ranks(world).run(there_and_back, dim)


def states_everywhere() -> None:
    """Spread numbers, matrices like the parameter, and others in containers."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.arange(15.0).view(5, 3)
    parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    matrix = OwnedMatrix(parameter, whole.shape, whole.dtype, mesh.get_group(), 0, 1)
    entry = {"step": 3, "moment": whole.T.contiguous().T, "sums": [torch.eye(5), (torch.ones(2),)]}
    states = spread(matrix, entry if matrix.is_here else {})
    assert states["step"] == 3
    assert states["moment"].to_local().shape[0] == 3 - dist.get_rank()
    assert torch.equal(full(states["moment"]), whole)
    assert torch.equal(states["sums"][0], torch.eye(5))
    assert torch.equal(states["sums"][1][0], torch.ones(2))


def test_states_of_an_owner_are_spread(ranks: "Ranks") -> None:
    ranks(2).run(states_everywhere)


def replaced() -> str:
    """Return what is said of a parameter that has another shape than it had."""
    group = init_device_mesh("cpu", (1,)).get_group()
    matrix = OwnedMatrix(torch.ones(2, 2), torch.Size((3, 3)), torch.float32, group, 0, 0)
    with pytest.raises(OptionError) as error:
        matrix.check("Parameter 0", {})
    return str(error.value)


def test_a_parameter_that_was_replaced_is_named(ranks: "Ranks") -> None:
    (said,) = ranks(1).run(replaced)
    assert "was torch.float32 of shape (3, 3) when it was taken up, and is torch.float32" in said
