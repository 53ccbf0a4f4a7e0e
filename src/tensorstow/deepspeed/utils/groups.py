"""``deepspeed.utils.groups``: the data-parallel ranks, which are all; no other dimension has two.

Functions with a leading underscore are upstream's, which users call as they are.
"""

import torch.distributed as dist

from tensorstow.fsdp.sharding import world_size

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
    """Return the group of all ranks.

    Returns:
        The group; None: there is none, and one rank.
    """
    return dist.group.WORLD if dist.is_initialized() else None


def get_data_parallel_world_size() -> int:
    """Return the number of data-parallel ranks.

    Returns:
        Ranks.
    """
    return world_size()


def get_data_parallel_rank() -> int:
    """Return this rank's number among the data-parallel ones.

    Returns:
        The rank, from 0.
    """
    return dist.get_rank() if dist.is_initialized() else 0


def get_model_parallel_world_size() -> int:
    """Return the number of model-parallel ranks.

    Returns:
        1: models are sharded over data-parallel ranks only.
    """
    return 1


def get_model_parallel_rank() -> int:
    """Return this rank's number among the model-parallel ones.

    Returns:
        0.
    """
    return 0


def get_sequence_parallel_world_size() -> int:
    """Return the number of sequence-parallel ranks.

    Returns:
        1: sequences are not split.
    """
    return 1


def get_sequence_parallel_rank() -> int:
    """Return this rank's number among the sequence-parallel ones.

    Returns:
        0.
    """
    return 0


_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_model_parallel_world_size = get_model_parallel_world_size
_get_sequence_parallel_world_size = get_sequence_parallel_world_size
_get_sequence_parallel_rank = get_sequence_parallel_rank
