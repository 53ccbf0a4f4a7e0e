"""Writes weights as codes, in the form that ``coded_weights`` reads, a piece at a time."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch

from tensorstow.base.errors import StoreFormatError
from tensorstow.checkpoint.coded_weights import SCALE, STATE
from tensorstow.formats.weight_codes import (
    BLOCK,
    NESTED_BLOCK,
    NF4,
    nested_table,
    quantize_blocks,
    quantize_rows,
    quantize_scales,
)
from tensorstow.io.safetensors import Entry

_PIECE = 4 << 20
"""Elements that are in memory at once."""
_OFFSET_DIGITS = 32
"""Characters that the text of an offset has room for."""
Put = Callable[[str, torch.Tensor, int], None]
"""Writes elements of a tensor of the new file, by name, from an element on."""


class Encoder(ABC):
    """A way to store the weight of a linear layer."""

    name: str
    """What the command line calls it."""

    @abstractmethod
    def entries(self, name: str, entry: Entry) -> dict[str, Entry]:
        """Return the tensors that a weight becomes."""

    @abstractmethod
    def write(self, name: str, values: torch.Tensor, put: Put) -> None:
        """Write the tensors of a weight; raise StoreFormatError if a value is not finite."""


class Int8Encoder(Encoder):
    """Int8, with a scale in fp32 for each row, under compressed-tensors' names.

    It is inexact: a value differs by at most half of its row's scale.
    """

    name = "int8"

    def entries(self, name: str, entry: Entry) -> dict[str, Entry]:
        """Return codes and scales."""
        scales = Entry(torch.float32, (entry.shape[0], 1))
        return {name: Entry(torch.int8, entry.shape), name + SCALE: scales}

    def write(self, name: str, values: torch.Tensor, put: Put) -> None:
        """Write codes and scales of some rows after the other."""
        columns = values.shape[1]
        count = max(1, _PIECE // max(1, columns))
        for start in range(0, len(values), count):
            rows = values[start : start + count].float()
            _validate_finite(name, rows)
            codes, scale = quantize_rows(rows)
            put(name, codes, start * columns)
            put(name + SCALE, scale, start)


class Nf4Encoder(Encoder):
    """NF4 with double quantization, as bitsandbytes and transformers write it. It is inexact."""

    name = "nf4"

    def entries(self, name: str, entry: Entry) -> dict[str, Entry]:
        """Return codes, scales' codes, both tables, and the state."""
        count = entry.nbytes // entry.dtype.itemsize
        blocks = -(-count // BLOCK)
        state = _state(entry.dtype, entry.shape, 0.0)
        return {
            name: Entry(torch.uint8, ((count + 1) // 2, 1)),
            f"{name}.absmax": Entry(torch.uint8, (blocks,)),
            f"{name}.quant_map": Entry(torch.float32, (16,)),
            f"{name}.nested_absmax": Entry(torch.float32, (-(-blocks // NESTED_BLOCK),)),
            f"{name}.nested_quant_map": Entry(torch.float32, (256,)),
            f"{name}{STATE}nf4": Entry(torch.uint8, (len(state),)),
        }

    def write(self, name: str, values: torch.Tensor, put: Put) -> None:
        """Write codes of some blocks after the other, and then what belongs to all scales."""
        flat, scales = values.reshape(-1), []
        # _PIECE is a multiple of BLOCK, which is even: no block and no byte is cut.
        for start in range(0, flat.numel(), _PIECE):
            piece = flat[start : start + _PIECE].float()
            _validate_finite(name, piece)
            codes, some = quantize_blocks(piece)
            put(name, codes, start // 2)
            scales.append(some)
        coded, nested = quantize_scales(torch.cat(scales))
        put(f"{name}.absmax", coded, 0)
        put(f"{name}.quant_map", NF4, 0)
        put(f"{name}.nested_absmax", nested.scales, 0)
        put(f"{name}.nested_quant_map", nested_table(), 0)
        put(f"{name}{STATE}nf4", _state(values.dtype, tuple(values.shape), nested.offset), 0)


ENCODERS: Mapping[str, Encoder] = {e.name: e for e in (Int8Encoder(), Nf4Encoder())}
"""The encoders by their names."""


def copy_weight(name: str, values: torch.Tensor, put: Put) -> None:
    """Write a tensor as it is, some elements after the other."""
    flat = values.reshape(-1)
    for start in range(0, flat.numel(), _PIECE):
        put(name, flat[start : start + _PIECE], start)


def _state(dtype: torch.dtype, shape: tuple[int, ...], offset: float) -> torch.Tensor:
    """Return bitsandbytes' state of a weight: JSON, of the same length for each offset."""
    facts = {
        "quant_type": "nf4",
        "blocksize": BLOCK,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "nested_blocksize": NESTED_BLOCK,
        "nested_dtype": "float32",
        "nested_offset": offset,
    }
    room = _OFFSET_DIGITS - len(json.dumps(offset))  # the table of the file is written first
    return torch.frombuffer(bytearray(json.dumps(facts).encode() + b" " * room), dtype=torch.uint8)


def _validate_finite(name: str, values: torch.Tensor) -> None:
    if not values.isfinite().all():
        message = (
            f"{name!r} has a value that is not finite, which no scale is for: the file is damaged,"
            " or its training was. Take the original, or the weights as they are."
        )
        raise StoreFormatError(message)
