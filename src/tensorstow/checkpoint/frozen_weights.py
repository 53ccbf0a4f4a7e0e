"""Frozen weights in the user's files: commits hold their checksums, and not their bytes.

A run goes on only over the weights that it was committed with. Weights in a file that nobody writes
to need no copy: ``resume`` reads the model's own weights and compares their checksums.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import tensorstow._native as _native
from tensorstow.base.errors import OptionError
from tensorstow.store.bounds import check, check_whole
from tensorstow.tensors.dtensor import in_memory, pager_of, shard_of

CHECKSUMS = "frozen"
"""The key of the checksums in a generation's ``hyper``."""
_MOST = (1 << 64) - 1


def is_in_files(tensor: torch.Tensor) -> bool:
    """Return whether a parameter's bytes are read from files of the user's."""
    pager = pager_of(tensor)
    return pager is not None and pager.is_in_files


def is_same_bytes(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors in host memory have the same bytes."""
    first, second = (t.detach().reshape(-1).view(torch.uint8) for t in (tensor, other))
    return torch.equal(first, second)


def checksum_of(tensor: torch.Tensor) -> int:
    """Return the checksum of this rank's bytes of a tensor, wherever they are."""
    with in_memory(tensor):
        shard = shard_of(tensor).detach().cpu().contiguous()
        return _native.checksum(shard.data_ptr(), shard.nbytes)


def read_checksums(hyper: Mapping[str, Any]) -> dict[str, int]:
    """Return the checksums that a commit has, by name; raise DamageError if they cannot be."""
    checksums = hyper.get(CHECKSUMS, {})
    check(checksums, "the checksums", "frozen weights", is_possible=isinstance(checksums, dict))
    for name, checksum in checksums.items():
        check_whole(checksum, "the checksum", f"frozen weight {name}", 0, _MOST)
    return dict(checksums)


def validate_checksums(
    tensors: Iterable[tuple[str, torch.Tensor]], checksums: Mapping[str, int]
) -> None:
    """Raise OptionError if a frozen weight, by name, has other values than in a commit.

    Tensors without one of the commit's ``checksums`` are not compared.
    """
    for name, tensor in tensors:
        if name in checksums and checksum_of(tensor) != checksums[name]:
            message = (
                f"{name} has other values than in the run that is stored here, which read it from"
                " a file and holds its checksum alone. Load the base model that the run began"
                " with, from the same files or a copy of them."
            )
            raise OptionError(message)
