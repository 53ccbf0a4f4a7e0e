"""``load_torch_file``: what ``torch.save`` wrote, read without running code that the file names."""

from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from tensorstow.base.regular_file import check_regular, memory_bytes


def load_torch_file(path: Path, *, maps: bool = False) -> Any:  # noqa: ANN401  # whatever was saved
    """Return the contents of a file of ``torch.save``, on the CPU; ``maps``: tensors are mapped.

    Raises DirectoryError if it is no regular file, or is read whole and larger than this machine's
    memory, and errors of any kind from ``torch.load`` if it is damaged.
    """
    check_regular(path)
    # torch maps only files of its zip format.
    is_mapped = maps and is_zipfile(path)
    if not is_mapped:
        check_regular(path, most=memory_bytes())
    return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
