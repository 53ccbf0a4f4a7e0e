"""Finds this process's rank, and starts the process group."""

import os

import torch
import torch.distributed as dist

from tensorstow.fsdp.sharding import backend_of, current_device


def rank_here() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,  # noqa: FBT001, FBT002  # upstream's own signature
    distributed_port: int = 29500,
    **more: object,
) -> None:
    """Join the process group of the ranks that a launcher started.

    It does nothing if the group exists, or if RANK and WORLD_SIZE are not set. torchrun, the
    deepspeed command and Slurm's wrappers set them.

    Args:
        dist_backend: The backend. Default: None, the accelerator's and gloo for host memory.
        auto_mpi_discovery: Not used; MPI is not queried.
        distributed_port: The port of rank 0, unless MASTER_PORT is set. Default: 29500.
        more: Upstream's other keywords; not used.
    """
    del auto_mpi_discovery, more
    if dist.is_initialized() or "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(distributed_port))
    device = current_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(local_rank())
    dist.init_process_group(dist_backend or backend_of(device))
