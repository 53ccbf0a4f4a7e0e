"""Tensors over meshes whose ranks are in another order than those of the run."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tensorstow.fsdp.full_tensors import host_dtensor
from tensorstow.fsdp.sharding import current_device


def put_together_on_host(*, in_rows: bool) -> list[float]:
    """Return a tensor that is put together of the shards that four ranks have in host memory.

    ``in_rows``: over this rank's row of the mesh.
    """
    ranks = [[0, 2], [1, 3]]
    mesh = DeviceMesh(current_device().type, ranks, mesh_dim_names=("replicate", "shard"))
    rows = torch.arange(6.0, device=mesh.device_type).chunk(2)[mesh.get_local_rank("shard")]
    placements = [Shard(0)] if in_rows else [Replicate(), Shard(0)]
    mesh = mesh["shard"] if in_rows else mesh
    parameter = DTensor.from_local(rows, mesh, placements, run_check=False)
    shard = host_dtensor(parameter.to_local().cpu(), parameter)
    return shard.full_tensor().tolist()  # type: ignore[attr-defined]
