"""``deepspeed.utils.groups``: the data-parallel ranks, which are all; no other dimension has two.

Functions with a leading underscore are upstream's, which users call as they are.
"""

import torch.distributed as dist

from tensorstow.fsdp.sharding import rank_here, world_size

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


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks."""
    return world_size()


def get_data_parallel_rank() -> int:
    """Return this rank's number among the data-parallel ones, from 0."""
    return rank_here()


def get_model_parallel_world_size() -> int:
    """Return 1: models are sharded over data-parallel ranks only."""
    return 1


def get_model_parallel_rank() -> int:
    """Return 0, this rank's number among the model-parallel ones."""
    return 0


def get_sequence_parallel_world_size() -> int:
    """Return 1: sequences are not split."""
    return 1


def get_sequence_parallel_rank() -> int:
    """Return 0, this rank's number among the sequence-parallel ones."""
    return 0


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_sequence_parallel_rank = get_sequence_parallel_rank
