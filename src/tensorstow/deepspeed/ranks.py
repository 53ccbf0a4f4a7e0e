"""Finds this process's rank, and starts the process group."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.sharding import backend_of, current_device


def rank_here() -> int:
    """Return the rank of this process."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Return the rank of this process on its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def init_distributed(  # noqa: PLR0913, PLR0917  # upstream's
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,  # noqa: FBT001, FBT002
    distributed_port: int = 29500,
    verbose: bool = True,  # noqa: FBT001, FBT002
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,  # noqa: FBT001
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of the ranks that a launcher started, or that the arguments say.

    It does nothing if the group exists; or if neither the arguments nor RANK and WORLD_SIZE in the
    environment say which rank this is. torchrun, the deepspeed command and Slurm's wrappers set
    them.

    Args:
        dist_backend: The backend. Default: None, the accelerator's and gloo for host memory.
        auto_mpi_discovery: Not used; MPI is not queried.
        distributed_port: The port of rank 0, unless MASTER_PORT is set. Default: 29500.
        verbose: Not used.
        timeout: How long a collective waits. Default: None, as many minutes as DEEPSPEED_TIMEOUT
            in the environment says, else torch's own.
        init_method: Where ranks meet, a URL ("file://...", "tcp://..."). Default: None, "env://".
        dist_init_required: False: the group must exist.
        config: Not used: there is no profile of collectives.
        rank: The rank of this process. Default: -1, from the environment.
        world_size: The number of ranks. Default: -1, from the environment.

    Raises:
        OptionError: The group must exist and does not; or there is an ``init_method``, and nothing
            says which rank this is.
    """
    del auto_mpi_discovery, verbose, config
    if dist.is_initialized():
        return
    if dist_init_required is False:
        message = (
            "dist_init_required=False was given, and there is no process group: call"
            " torch.distributed.init_process_group() before, or leave it out."
        )
        raise OptionError(message)
    rank = int(os.environ.get("RANK", "-1")) if rank < 0 else rank
    world_size = int(os.environ.get("WORLD_SIZE", "-1")) if world_size < 0 else world_size
    if rank < 0 or world_size < 0:
        if init_method is None and rank == world_size:
            return
        message = (
            f"init_distributed(init_method={init_method!r}) was called for rank {rank} of"
            f" {world_size}: give rank= and world_size=, or set RANK and WORLD_SIZE."
        )
        raise OptionError(message)
    if init_method is None:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(distributed_port))
    device = current_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(
            int(os.environ.get("LOCAL_RANK", rank % torch.accelerator.device_count()))
        )
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if timeout is None and minutes is not None:
        timeout = timedelta(minutes=int(minutes))
    dist.init_process_group(
        dist_backend or backend_of(device),
        init_method,
        timeout,
        rank=rank,
        world_size=world_size,
    )
