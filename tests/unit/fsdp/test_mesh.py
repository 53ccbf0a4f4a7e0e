"""Meshes: what stages and replicas make of ranks, and the groups that carry host memory."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from ranks.pool import Ranks
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.mesh import _backend, device_here, host_group, mesh_of, world_here

Pool = Callable[[int], Ranks]
CPU = torch.device("cpu")
Shape = tuple[tuple[int, ...], tuple[str, ...] | None]


def shape_of(stage: int, replicas: int) -> Shape | str:
    try:
        mesh = mesh_of(CPU, stage=stage, replicas=replicas)
    except OptionError as error:
        return str(error)
    return tuple(mesh.shape), mesh.mesh_dim_names


@pytest.mark.parametrize(
    ("stage", "replicas", "shape"),
    [
        (3, 1, ((4,), ("shard",))),
        (1, 1, ((4,), ("shard",))),
        (3, 2, ((2, 2), ("replicate", "shard"))),
        (2, 4, ((4, 1), ("replicate", "shard"))),
        (0, 1, ((4, 1), ("replicate", "shard"))),
    ],
)
def test_ranks_are_shards_of_replicas(ranks: Pool, stage: int, replicas: int, shape: Shape) -> None:
    assert ranks(4).run(shape_of, stage, replicas) == [shape] * 4


def test_replicas_that_do_not_divide_the_ranks_are_refused(ranks: Pool) -> None:
    for said in ranks(4).run(shape_of, 3, 3):
        assert "replicas=3 was given for 4 ranks" in said


def groups() -> tuple[int, bool, bool]:
    group = host_group()
    return world_here(), group is None, group is dist.group.WORLD


@pytest.mark.parametrize("world", [1, 2])
def test_host_memory_goes_through_the_group_that_is_there(ranks: Pool, world: int) -> None:
    assert ranks(world).run(groups) == [(world, world == 1, world > 1)] * world


def test_before_any_group_torchrun_says_how_many_ranks_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert world_here() == 1  # somebody else's variable
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert world_here() == 8


def test_a_group_carries_host_memory_beside_an_accelerator() -> None:
    assert _backend(CPU) == "gloo"
    assert _backend(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"


def test_the_device_here_is_one_that_works() -> None:
    assert torch.ones(2, device=device_here()).sum() == 2
