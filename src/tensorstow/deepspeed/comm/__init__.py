"""``deepspeed.comm``: torch.distributed, and upstream's ``init_distributed``.

Every name of ``torch.distributed`` is here: upstream's functions have its signatures, with further
arguments for a log of collectives, which does not exist here.
"""

from typing import Any

import torch.distributed as dist

from tensorstow.deepspeed.ranks import init_distributed, local_rank

__all__ = ["get_local_rank", "get_rank", "get_world_size", "init_distributed"]


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process.

    Args:
        group: The group. Default: None, all ranks.

    Returns:
        The rank; 0 without a group of processes.
    """
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks.

    Args:
        group: The group. Default: None, all ranks.

    Returns:
        Ranks; 1 without a group of processes.
    """
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """Return the rank of this process on its machine.

    Returns:
        The rank, from 0.
    """
    return local_rank()


def __getattr__(name: str) -> Any:  # noqa: ANN401  # whatever torch has
    """Return what torch.distributed has by this name."""
    return getattr(dist, name)
