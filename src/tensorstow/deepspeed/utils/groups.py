"""``deepspeed.utils.groups``: the data-parallel ranks, which are all; no other dimension has two.

Functions with a leading underscore are upstream's, which users call as they are.
"""

import torch.distributed as dist

from tensorstow.fsdp.sharding import rank_here as get_data_parallel_rank
from tensorstow.fsdp.sharding import world_size as get_data_parallel_world_size

__all__ = [
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_sequence_parallel_rank",
    "get_sequence_parallel_world_size",
]


def get_data_parallel_group() -> dist.ProcessGroup | None:
    """Return the group of all ranks; None: there is none, and one rank."""
    return dist.group.WORLD if dist.is_initialized() else None


def get_model_parallel_world_size() -> int:
    """Return 1: neither models nor sequences are split over ranks."""
    return 1


def get_model_parallel_rank() -> int:
    """Return 0, this rank's number among those that share a model or a sequence."""
    return 0


get_sequence_parallel_world_size = get_model_parallel_world_size
get_sequence_parallel_rank = get_model_parallel_rank
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_sequence_parallel_rank = get_sequence_parallel_rank
