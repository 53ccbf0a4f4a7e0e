"""``deepspeed.comm``: torch.distributed, and upstream's ``init_distributed``.

Every name of ``torch.distributed`` is here: upstream's functions have its signatures, with further
arguments for a log of collectives, which does not exist here.
"""

import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import Launch, launched
from tensorstow.fsdp.sharding import backend_of, current_device, join_ranks, rank_here, world_size

__all__ = ["get_local_rank", "get_rank", "get_world_size", "init_distributed"]


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process; without a group of processes, the launcher's."""
    return dist.get_rank(group) if dist.is_initialized() else rank_here()


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks; without a group of processes, the launcher's."""
    return dist.get_world_size(group) if dist.is_initialized() else world_size()


def get_local_rank() -> int:
    """Return the rank of this process on its machine, from 0."""
    return launched().local_rank or 0


def refuse_model_parallel(mpu: object, /, *, meshed: bool = False, **given: object) -> None:
    """Raise OptionError for several model-parallel ranks, of ``mpu`` or a mesh, as were given."""
    size = getattr(mpu, "get_model_parallel_world_size", lambda: 1)()
    if size > 1 or meshed:
        arguments = ", ".join(f"{name}={value!r}" for name, value in given.items())
        message = (
            f"{arguments} were given: models are sharded over data-parallel ranks only. Leave them"
            " out."
        )
        raise OptionError(message)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: object = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Join the process group of the ranks that a launcher started, or that the arguments describe.

    It does nothing if the group exists. torchrun, the deepspeed command, mpirun and srun say which
    rank this is; a process without a launcher has a group of its own.

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
        OptionError: The group must exist and does not; or nothing says which rank this is, or how
            the ranks meet.
        RankError: The ranks did not meet.
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
    launch = launched()
    if init_method is not None or rank >= 0 or world_size >= 0:
        launch = _with_arguments(launch, rank, world_size, init_method)
    device = current_device()
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        index = (launch.rank or 0) % count if launch.local_rank is None else launch.local_rank
        torch.accelerator.set_device_index(index)
    minutes = os.environ.get("DEEPSPEED_TIMEOUT")
    if timeout is None and minutes is not None:
        timeout = timedelta(minutes=int(minutes))
    backend = dist_backend or backend_of(device)
    if init_method is not None:
        dist.init_process_group(backend, init_method, timeout, launch.world, launch.rank or 0)
        return
    if launch.port is None:
        launch = replace(launch, port=str(distributed_port))
        os.environ.setdefault("MASTER_PORT", str(distributed_port))  # which torch reads
    join_ranks(launch, backend, timeout)


def _with_arguments(launch: Launch, rank: int, world_size: int, init_method: str | None) -> Launch:
    """Return the launch that arguments describe, completed by the environment."""
    number = rank if rank >= 0 or not launch.source else launch.rank
    world = world_size if world_size >= 0 or not launch.source else launch.world
    if number is None or number < 0 or world < 0:
        message = (
            f"init_distributed(init_method={init_method!r}) was called for rank {number} of"
            f" {world}: pass rank= and world_size=, or set RANK and WORLD_SIZE."
        )
        raise OptionError(message)
    return replace(launch, world=world, rank=number, source=f"rank={number} and world_size={world}")


def __getattr__(name: str) -> Any:
    """Return what torch.distributed has by this name."""
    return getattr(dist, name)
