"""The safetensors format: eight bytes, a table in JSON, and the tensors one after the other.

Written and read here because both have to be done with bounded memory: the library of that name
wants all tensors at once to write them. Tests hold this against it.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.base.regular_file import regular_stream

_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES_READ = _NAMES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
}
"""Those that other programs write, too."""
NAME_OF = {dtype: name for name, dtype in _NAMES_READ.items()}
METADATA = {"format": "pt"}
"""The metadata that readers of model files look for."""
_METADATA = "__metadata__"
_LONGEST = 100_000_000
"""Bytes of a table; what the library takes."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int = 0
    """Where its bytes begin, from the begin of the file."""

    @property
    def nbytes(self) -> int:
        """Return the bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Table:
    """The tensors of a file and their offsets."""

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    header: bytes
    """The bytes that the file begins with."""
    nbytes: int
    """The bytes of the whole file."""


def lay_out(tensors: Mapping[str, Entry], metadata: Mapping[str, str] = METADATA) -> Table:
    """Return the table of a file of ``tensors``, whose offsets are found here."""
    rows: dict[str, Any] = {_METADATA: dict(metadata)}
    end = 0
    # The widest first: so every tensor begins at a multiple of its own width, without gaps.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
    for name, entry in ordered:
        if entry.dtype not in _NAMES.values():
            message = (
                f"{name} has dtype {entry.dtype}, which is not written to safetensors here. Save"
                " the state_dict by torch.save."
            )
            raise OptionError(message)
        rows[name] = {
            "dtype": NAME_OF[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [end, end + entry.nbytes],
        }
        end += entry.nbytes
    text = json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin after it, at a multiple of the widest element
    base = 8 + len(text)
    entries = {
        name: Entry(entry.dtype, entry.shape, base + rows[name]["data_offsets"][0])
        for name, entry in ordered
    }
    return Table(entries, dict(metadata), len(text).to_bytes(8, "little") + text, base + end)


def read_table(path: Path, descriptor: int | None = None) -> Table:
    """Return the table of a file; raise OptionError if it is gone, cut short or of another kind.

    ``descriptor``: the file is open, and its name may be another's by now. Raises DirectoryError
    for a pipe, a device or a directory.
    """
    try:
        with regular_stream(path if descriptor is None else f"/proc/self/fd/{descriptor}") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if 0 < length <= _LONGEST else b""
            nbytes = os.fstat(file.fileno()).st_size
    # An OSError too, with a message that says already what is there.
    except DirectoryError:
        raise
    except OSError as error:
        message = f"File {path} was to be read: {error.strerror}. Name a file that exists."
        raise OptionError(message) from error
    if not text or len(text) != length:
        raise _malformed(path, "it does not begin with a table")
    try:
        rows = _object(json.loads(text), "its table")
        notes = _object(rows.pop(_METADATA, None) or {}, _METADATA)
        metadata = {str(k): str(v) for k, v in notes.items()}
        entries = {n: _entry(_object(row, f"{n!r}"), 8 + length) for n, row in rows.items()}
    except ValueError as error:
        raise _malformed(path, f"its table cannot be read: {error}") from error
    except (KeyError, TypeError, RecursionError) as error:
        raise _malformed(path, f"its table cannot be read ({error!r})") from error
    _check_extent(path, entries, 8 + length, nbytes)
    return Table(entries, metadata, length.to_bytes(8, "little") + text, nbytes)


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        message = f"{name} is no JSON object ({type(value).__name__} was found)"
        raise ValueError(message)  # noqa: TRY004  # of the file, not of a caller's
    return value


def _entry(row: Mapping[str, Any], base: int) -> Entry:
    begin, end = row["data_offsets"]
    shape = tuple(row["shape"])
    # Not isinstance: JSON's true and false are ints in Python.
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        message = f"{row} has something else than whole numbers"
        raise ValueError(message)
    entry = Entry(_NAMES_READ[row["dtype"]], shape, base + begin)
    if entry.nbytes != end - begin:
        message = f"{row} does not take as many bytes as it says"
        raise ValueError(message)
    return entry


def _check_extent(path: Path, entries: Mapping[str, Entry], base: int, nbytes: int) -> None:
    """Raise OptionError unless the tensors fill the file from the table to its end."""
    end = base
    # By bytes too: an empty tensor has the offset of the one that follows it.
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != end:
            raise _malformed(path, "its tensors overlap or leave gaps")
        end += entry.nbytes
    if end != nbytes:
        raise _malformed(path, f"its tensors end at byte {end} and the file at {nbytes}")


def _malformed(path: Path, why: str) -> OptionError:
    message = (
        f"{path} was to be read as safetensors, and {why}. It is another kind of file, or its copy"
        " was cut short: take the original."
    )
    return OptionError(message)
