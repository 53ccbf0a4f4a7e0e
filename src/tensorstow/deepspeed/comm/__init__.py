"""``deepspeed.comm``: torch.distributed, and upstream's ``init_distributed``.

Every name of ``torch.distributed`` is here: upstream's functions have its signatures, with further
arguments for a log of collectives, which does not exist here.
"""

from typing import Any

import torch.distributed as dist

from tensorstow.deepspeed.ranks import init_distributed
from tensorstow.deepspeed.ranks import local_rank as get_local_rank
from tensorstow.fsdp.sharding import rank_here, world_size

__all__ = ["get_local_rank", "get_rank", "get_world_size", "init_distributed"]


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """Return the rank of this process; without a group of processes, the launcher's."""
    return dist.get_rank(group) if dist.is_initialized() else rank_here()


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """Return the number of ranks; without a group of processes, the launcher's."""
    return dist.get_world_size(group) if dist.is_initialized() else world_size()


def __getattr__(name: str) -> Any:
    """Return what torch.distributed has by this name."""
    return getattr(dist, name)
