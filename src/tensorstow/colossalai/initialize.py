"""``launch``: starts the process group of a ColossalAI script; one process alone needs none."""

import os
import random

import numpy as np
import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import launched
from tensorstow.fsdp.sharding import backend_of, current_device

_OF_CUDA = "nccl"


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = _OF_CUDA,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,  # upstream's own signature
) -> None:
    """Join the process group and seed the random numbers.

    Args:
        rank: The rank of this process.
        world_size: The number of ranks.
        host: The address of rank 0.
        port: The port of rank 0.
        backend: The backend of tensors on the accelerator; those in host memory have gloo.
            Default: "nccl", which means the accelerator's own.
        local_rank: The rank on this machine, for the accelerator's index. Default: None, the rank
            modulo the number of accelerators.
        seed: Of Python's, NumPy's and torch's random numbers.
        verbose: Whether the number of ranks is printed by rank 0.

    Raises:
        OptionError: A process group exists already.
    """
    if dist.is_initialized():
        message = "launch() was called, and a process group exists already: call it once."
        raise OptionError(message)
    device = current_device()
    if device.type != "cpu":
        index = rank % torch.accelerator.device_count() if local_rank is None else local_rank
        torch.accelerator.set_device_index(index)
    address = f"[{host}]" if ":" in host else host
    backends = backend_of(device)
    if backend != _OF_CUDA:
        backends = backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    dist.init_process_group(
        backends, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size
    )
    set_seed(seed)
    if verbose and rank == 0:
        print(f"{world_size} ranks")  # noqa: T201  # verbose


def launch_from_torch(
    backend: str = _OF_CUDA,
    seed: int = 1024,
    verbose: bool = True,  # upstream's own signature
) -> None:
    """Join the process group that a launcher describes; without a launcher, only seed.

    Args:
        backend, seed, verbose: As of ``launch``.

    Raises:
        OptionError: Variables describe several ranks, and one of them is missing.
    """
    environment = launched()
    if not environment.source:
        if "RANK" in os.environ:
            message = (
                "launch_from_torch() was called, and RANK is set in the environment and WORLD_SIZE"
                " is not: start the ranks with torchrun, or unset RANK."
            )
            raise OptionError(message)
        set_seed(seed)
        return
    rank, host, port = environment.meeting()
    launch(rank, environment.world, host, port, backend, environment.local_rank, seed, verbose)


def launch_from_slurm(
    host: str,
    port: int,
    backend: str = _OF_CUDA,
    seed: int = 1024,
    verbose: bool = True,  # upstream's own signature
) -> None:
    """Join the process group of the ranks that Slurm started.

    Args:
        host, port, backend, seed, verbose: As of ``launch``.

    Raises:
        OptionError: Slurm's variables are not set.
    """
    _launch_by("SLURM_PROCID", host, port, backend, seed, verbose)


def launch_from_openmpi(
    host: str,
    port: int,
    backend: str = _OF_CUDA,
    seed: int = 1024,
    verbose: bool = True,  # upstream's own signature
) -> None:
    """Join the process group of the ranks that Open MPI started.

    Args:
        host, port, backend, seed, verbose: As of ``launch``.

    Raises:
        OptionError: Open MPI's variables are not set.
    """
    _launch_by("OMPI_COMM_WORLD_RANK", host, port, backend, seed, verbose)


def set_seed(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and torch.

    Args:
        seed: The seed.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the global one, which scripts use
    torch.manual_seed(seed)


def _launch_by(variable: str, host: str, port: int, backend: str, seed: int, verbose: bool) -> None:
    """Join the process group of the ranks of the launcher that sets ``variable``."""
    # Variables of this launcher alone: ``launched`` prefers those of one inside of it.
    prefix = variable.partition("_")[0]
    place = launched({name: value for name, value in os.environ.items() if name.startswith(prefix)})
    if not place.source:
        message = (
            f"{variable} is not set, or not for one of several ranks: this process was not started"
            " by that launcher. Start it with the launcher, or call launch_from_torch()."
        )
        raise OptionError(message)
    launch(place.rank or 0, place.world, host, port, backend, place.local_rank, seed, verbose)
