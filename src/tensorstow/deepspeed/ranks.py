"""Which rank this is, and how ranks find each other."""

import os

import torch
import torch.distributed as dist

from tensorstow.fsdp.sharding import backend_of, current_device


def rank_here() -> int:
    """Return this process's number among all."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return this process's number on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,  # noqa: FBT001, FBT002  # upstream's own signature
    distributed_port: int = 29500,
    **more: object,
) -> None:
    """Join the ranks that a launcher started; nothing where they are joined, or there are none.

    ``dist_backend``: None takes the accelerator's beside gloo, which host memory needs. Launchers
    that set RANK and WORLD_SIZE (torchrun, the deepspeed command, Slurm's wrappers) are understood;
    MPI is not asked.
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
