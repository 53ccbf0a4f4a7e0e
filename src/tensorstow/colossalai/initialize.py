"""``launch``: starts the process group of a ColossalAI script; one process alone needs none."""

import os
import random
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.sharding import backend_of, current_device

_OF_CUDA = "nccl"
_TORCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NPROCS")
_OPENMPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE")


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str = _OF_CUDA,
    local_rank: int | None = None,
    seed: int = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002  # upstream's own signature
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
    own = backend_of(device)
    if backend != _OF_CUDA:
        own = backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"
    dist.init_process_group(
        own, init_method=f"tcp://{address}:{port}", rank=rank, world_size=world_size
    )
    set_seed(seed)
    if verbose and rank == 0:
        print(f"{world_size} ranks")  # noqa: T201  # verbose


def launch_from_torch(
    backend: str = _OF_CUDA,
    seed: int = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002  # upstream's own signature
) -> None:
    """Join the process group that torchrun describes; without torchrun, only seed.

    Args:
        backend: As of ``launch``.
        seed: As of ``launch``.
        verbose: As of ``launch``.

    Raises:
        OptionError: Some of torchrun's variables are set, and others are not.
    """
    found = _numbers(_TORCH)
    if not found:
        set_seed(seed)
        return
    launch(
        rank=int(found["RANK"]),
        world_size=int(found["WORLD_SIZE"]),
        host=found["MASTER_ADDR"],
        port=int(found["MASTER_PORT"]),
        backend=backend,
        local_rank=int(found["LOCAL_RANK"]),
        seed=seed,
        verbose=verbose,
    )


def launch_from_slurm(
    host: str,
    port: int,
    backend: str = _OF_CUDA,
    seed: int = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002  # upstream's own signature
) -> None:
    """Join the process group of the ranks that Slurm started.

    Args:
        host: As of ``launch``.
        port: As of ``launch``.
        backend: As of ``launch``.
        seed: As of ``launch``.
        verbose: As of ``launch``.

    Raises:
        OptionError: Slurm's variables are not set.
    """
    found = _numbers(_SLURM) or _missing(_SLURM)
    rank, world = (int(found[name]) for name in _SLURM)
    launch(rank, world, host, port, backend, None, seed, verbose)


def launch_from_openmpi(
    host: str,
    port: int,
    backend: str = _OF_CUDA,
    seed: int = 1024,
    verbose: bool = True,  # noqa: FBT001, FBT002  # upstream's own signature
) -> None:
    """Join the process group of the ranks that Open MPI started.

    Args:
        host: As of ``launch``.
        port: As of ``launch``.
        backend: As of ``launch``.
        seed: As of ``launch``.
        verbose: As of ``launch``.

    Raises:
        OptionError: Open MPI's variables are not set.
    """
    found = _numbers(_OPENMPI) or _missing(_OPENMPI)
    rank, local_rank, world = (int(found[name]) for name in _OPENMPI)
    launch(rank, world, host, port, backend, local_rank, seed, verbose)


def set_seed(seed: int) -> None:
    """Seed the random numbers of Python, NumPy and torch.

    Args:
        seed: The seed.
    """
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # the global one, which scripts use
    torch.manual_seed(seed)


def _numbers(names: tuple[str, ...]) -> Mapping[str, str]:
    """Return the variables of a launcher; empty where none is set."""
    found = {name: os.environ[name] for name in names if name in os.environ}
    if found and len(found) < len(names):
        missing = sorted(set(names) - set(found))
        message = (
            f"{', '.join(sorted(found))} is set in the environment, and {', '.join(missing)} is"
            " not: start the ranks with their launcher, or unset them."
        )
        raise OptionError(message)
    return found


def _missing(names: tuple[str, ...]) -> Mapping[str, str]:
    message = f"{', '.join(names)} are not set: this process was not started by that launcher."
    raise OptionError(message)
