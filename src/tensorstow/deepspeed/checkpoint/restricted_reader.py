"""Reads what ``torch.distributed.checkpoint`` wrote without running code that the files may name.

Torch opens ``.metadata`` with pickle, and entries that are no tensors by ``torch.load`` without
``weights_only``: both run what a file says. Here metadata may have the classes that torch puts
there and no others, and entries are tensors.
"""

import math
import pickle
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load

from tensorstow.base.errors import DamageError, StoreFormatError
from tensorstow.base.regular_file import check_regular, regular_stream

_METADATA = ".metadata"
_MOST_BYTES = 1 << 30
"""No metadata is larger: it has some hundred bytes for each part of a tensor."""
_CLASSES = {
    (kind.__module__, kind.__name__)
    for kind in (
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.Metadata,
        metadata.MetadataIndex,
        metadata.StorageMeta,
        metadata.TensorProperties,
        metadata.TensorStorageMetadata,
        metadata._MEM_FORMAT_ENCODING,  # noqa: SLF001  # it is in every file
        filesystem._StorageInfo,  # noqa: SLF001  # so is this
    )
} | {
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # its module in Python 3.13
    ("torch.serialization", "_get_layout"),
}
"""Module and name of what metadata may name, besides torch's dtypes and its ``Size``."""


class _Unpickler(pickle.Unpickler):
    """Makes what is in ``_CLASSES``, and raises UnpicklingError for everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        value = getattr(torch, name, None) if module == "torch" else None
        if value is torch.Size or isinstance(value, torch.dtype):
            return value
        message = f"it names {module}.{name}, which no metadata of torch's has"
        raise pickle.UnpicklingError(message)


def _memory_format(kind: object, name: str) -> object:
    """Return a member of torch's enumeration, which Python 3.11.0 to 3.11.3 writes as a getattr."""
    if kind is not metadata._MEM_FORMAT_ENCODING:  # noqa: SLF001  # see above
        message = f"it names {str(name)[:80]!r} of another object than torch's memory formats"
        raise pickle.UnpicklingError(message)
    return metadata._MEM_FORMAT_ENCODING[name]  # noqa: SLF001


def load_tensors(
    folder: Path, room: dict[str, torch.Tensor], *, group: dist.ProcessGroup | None, alone: bool
) -> None:
    """Read the tensors of a checkpoint into ``room``, by name.

    Args:
        folder: The checkpoint.
        room: Tensors of the right shapes, which are overwritten.
        group: The ranks that read together; None: one process.
        alone: Whether this rank reads by itself, whatever the group.

    Raises:
        StoreFormatError: An entry is missing or no tensor, or the metadata names code.
        DamageError: The metadata is not what torch wrote.
    """
    entries: Any = RestrictedReader(folder).read_metadata().state_dict_metadata
    for name in room:
        if not isinstance(entries.get(name), metadata.TensorStorageMetadata):
            raise _refuse_entry(name)
    load(
        room,
        checkpoint_id=folder,
        storage_reader=RestrictedReader(folder),
        planner=_TensorPlanner(),
        process_group=None if alone else group,
        no_dist=alone,
    )


class RestrictedReader(filesystem.FileSystemReader):
    """torch's reader of a folder; its metadata runs no code."""

    def read_metadata(self, *_: object, **__: object) -> metadata.Metadata:
        """Return the metadata of the folder, which ``dcp.load`` asks for.

        Raises:
            StoreFormatError: The file names something else than torch writes there.
            DamageError: The file is not what torch wrote.
            DirectoryError: It, or a file that it names, is a pipe, a device or a directory.
        """
        path = Path(self.path) / _METADATA
        content = _read(path)
        for name in {info.relative_path for info in content.storage_data.values()}:
            with suppress(FileNotFoundError):  # torch says so, if the file is needed
                check_regular(path.with_name(name))
        if not isinstance(getattr(content, "storage_meta", None), metadata.StorageMeta):
            content.storage_meta = metadata.StorageMeta()
        content.storage_meta.load_id = self.load_id  # type: ignore[union-attr]  # see above
        return content


class _TensorPlanner(DefaultLoadPlanner):
    """torch's plan of what to read, for tensors alone: another entry would be unpickled."""

    def load_bytes(self, read_item: ReadItem, value: BytesIO) -> None:
        del value
        raise _refuse_entry(read_item.dest_index.fqn)


def _refuse_entry(name: str) -> StoreFormatError:
    message = (
        f"The entry {name!r} of a checkpoint was requested, and it is missing or no tensor: the"
        " checkpoint is damaged, or was not written by save_checkpoint(). Load another one."
    )
    return StoreFormatError(message)


def _read(path: Path) -> metadata.Metadata:
    try:
        with regular_stream(path, most=_MOST_BYTES) as file:
            content = _Unpickler(file).load()
    except OSError:
        raise
    except pickle.UnpicklingError as error:
        message = (
            f"{path} was to be read, and it is damaged or was not written by torch: {error}. Load"
            " another checkpoint."
        )
        raise StoreFormatError(message) from error
    except Exception as error:  # pickle raises errors of many kinds for damaged bytes
        message = f"{path} was to be read, and it is damaged: {error}. Load another checkpoint."
        raise DamageError(message) from error
    if not isinstance(content, metadata.Metadata) or not _is_whole(content):
        message = (
            f"{path} was to be read, and it is not what torch.distributed.checkpoint writes there,"
            " or it names files outside of its folder. Load another checkpoint."
        )
        raise DamageError(message)
    return content


def _is_whole(content: metadata.Metadata) -> bool:
    """Return whether the parts that are used are of their types, and files are of the folder."""
    # What is unpickled has the attributes that the file gives it.
    entries, places = (
        getattr(content, "state_dict_metadata", 0),
        getattr(content, "storage_data", 0),
    )
    return (
        isinstance(entries, dict)
        and isinstance(places, dict)
        and all(isinstance(k, str) and _is_entry(entry) for k, entry in entries.items())
        and all(_is_in_folder(place) for place in places.values())
    )


def _is_entry(entry: object) -> bool:
    if isinstance(entry, metadata.BytesStorageMetadata):
        return True
    chunks = getattr(entry, "chunks", None)
    return (
        isinstance(entry, metadata.TensorStorageMetadata)
        and isinstance(getattr(entry, "size", None), torch.Size)
        and isinstance(getattr(getattr(entry, "properties", None), "dtype", None), torch.dtype)
        and isinstance(chunks, list)
        and all(
            isinstance(getattr(chunk, name, None), torch.Size)
            for chunk in chunks
            for name in ("offsets", "sizes")
        )
        and _are_all_of(entry.size, chunks)
    )


def _are_all_of(size: torch.Size, chunks: list[metadata.ChunkStorageMetadata]) -> bool:
    """Return whether each element of a tensor is in one chunk: torch leaves others as they are."""
    boxes = [(*chunk.offsets, *chunk.sizes) for chunk in chunks]
    numbers = [*size, *(number for box in boxes for number in box)]
    if any(len(box) != 2 * len(size) for box in boxes) or not all(
        0 <= n < 1 << 62 for n in numbers
    ):
        return False
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
        return False
    starts, lengths = (
        torch.tensor(boxes, dtype=torch.int64).view(len(boxes), 2, len(size)).unbind(1)
    )
    ends = starts + lengths
    if (ends > torch.tensor(size, dtype=torch.int64)).any():
        return False
    # Those of no elements share none.
    starts, ends = (at[(lengths > 0).all(1)] for at in (starts, ends))
    for index in range(1, len(starts)):
        meets = (starts[:index] < ends[index]) & (starts[index] < ends[:index])
        if meets.all(1).any():
            return False
    return True


def _is_in_folder(place: object) -> bool:
    name = getattr(place, "relative_path", None)
    numbers = (getattr(place, "offset", None), getattr(place, "length", None))
    is_name = isinstance(name, str) and name not in {"", ".", ".."} and Path(name).name == name
    return is_name and all(type(number) is int and number >= 0 for number in numbers)
