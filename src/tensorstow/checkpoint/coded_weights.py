"""Weights in files that are stored as codes: in int8 by rows, and in 4 bits by bitsandbytes.

[Note: Weights in int8] An int8 tensor may have scales: a tensor with its name and ``SCALE`` at the
end, one for each row. These are the names of compressed-tensors.

[Note: Weights in 4 bits] A tensor of bytes has ``quant_state.bitsandbytes__nf4`` after its name:
JSON in a tensor of bytes, with the shape. ``absmax`` has the scales of the blocks, or their codes;
then ``nested_absmax`` and ``nested_quant_map`` give their values. What is as small as a table is
kept in memory; codes are read wherever values are needed.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tensorstow.base.errors import StoreFormatError
from tensorstow.formats.weight_codes import (
    Blocks,
    NestedScales,
    dequantize_blocks,
    dequantize_rows,
    dequantize_scales,
)
from tensorstow.io.safetensors import NAME_OF, Entry

SCALE = "_scale"
"""Ends the name of the scales of a tensor's rows."""
STATE = ".quant_state.bitsandbytes__"
"""Stands between the name of a tensor in 4 bits and the name of its table."""
TABLES = ("nf4", "fp4")
Memory = Callable[[int, int, torch.dtype], torch.Tensor]
"""Returns elements of a buffer, by the place of the first one, their number and their dtype."""


@dataclass(frozen=True, slots=True)
class CodedPart:
    """Bytes of one tensor of the files."""

    source: str
    entry: Entry
    """Their dtype and shape, and where they begin in the tensor."""


class CodedWeight(ABC):
    """A tensor that files have as codes, of which values are computed row by row."""

    shape: tuple[int, ...]
    """The shape of the values."""
    sources: tuple[str, ...]
    """The names of its tensors in the files."""

    @abstractmethod
    def parts(self, start: int, stop: int) -> list[CodedPart]:
        """Return what is read for rows from ``start`` to before ``stop``."""

    @abstractmethod
    def decode(
        self, parts: Sequence[torch.Tensor], start: int, stop: int, into: torch.Tensor
    ) -> None:
        """Compute the rows' values of what ``parts`` names, rounded to the dtype of ``into``."""


def coded_weights(
    entries: Mapping[str, Entry], read: Callable[[str], torch.Tensor]
) -> dict[str, CodedWeight]:
    """Return the coded weights among tensors of files, by name.

    Args:
        entries: The tensors of the files.
        read: Returns one by its name.

    Raises:
        StoreFormatError: The tensors of one do not fit together.
    """
    coded: dict[str, CodedWeight] = {}
    for name, entry in entries.items():
        scale = entries.get(name + SCALE)
        if entry.dtype == torch.int8 and scale is not None and _is_of_rows(scale, entry):
            coded[name] = RowCodedWeight(name, entry.shape, scale.dtype)
        kind = next((kind for kind in TABLES if name + STATE + kind in entries), None)
        if kind is not None and not entry.dtype.is_floating_point:
            coded[name] = BlockCodedWeight(name, kind, entries, read)
    return coded


def _is_of_rows(scale: Entry, codes: Entry) -> bool:
    """Return whether a tensor has a scale for each row of a matrix of codes."""
    rows = codes.shape[:1]
    fits = len(codes.shape) == 2 and scale.shape in {rows, (*rows, 1)}
    return fits and scale.dtype.is_floating_point


class RowCodedWeight(CodedWeight):
    """A matrix in int8, with a scale for each row."""

    def __init__(self, name: str, shape: tuple[int, ...], scale_dtype: torch.dtype) -> None:
        """Read nothing; ``name`` and ``shape`` are those of the codes."""
        self.shape = shape
        self.sources = (name, name + SCALE)
        self._scale_dtype = scale_dtype

    def parts(self, start: int, stop: int) -> list[CodedPart]:
        """Return the rows' codes and scales."""
        rows, columns = stop - start, self.shape[1]
        dtype = self._scale_dtype
        return [
            CodedPart(self.sources[0], Entry(torch.int8, (rows, columns), start * columns)),
            CodedPart(self.sources[1], Entry(dtype, (rows,), start * dtype.itemsize)),
        ]

    def decode(
        self, parts: Sequence[torch.Tensor], start: int, stop: int, into: torch.Tensor
    ) -> None:
        """Multiply codes and scales."""
        codes, scale = parts
        dequantize_rows(codes.view(stop - start, self.shape[1]), scale, into)


class BlockCodedWeight(CodedWeight):
    """A matrix in 4 bits, with a scale for each block of elements."""

    def __init__(
        self,
        name: str,
        kind: str,
        entries: Mapping[str, Entry],
        read: Callable[[str], torch.Tensor],
    ) -> None:
        """Read the tables; raise StoreFormatError if a tensor of the weight does not fit."""
        facts = _facts(name, bytes(read(name + STATE + kind).numpy()))
        self.shape = tuple(facts["shape"])
        self._block, count = facts["blocksize"], math.prod(self.shape)
        blocks, is_nested = -(-count // self._block), "nested_blocksize" in facts
        self._scales = "absmax", torch.uint8 if is_nested else torch.float32
        wanted = {
            name: (entries[name].dtype, (count + 1) // 2),
            f"{name}.absmax": (self._scales[1], blocks),
            f"{name}.quant_map": (torch.float32, 16),
        }
        if is_nested:
            groups = -(-blocks // facts["nested_blocksize"])
            wanted[f"{name}.nested_absmax"] = torch.float32, groups
            wanted[f"{name}.nested_quant_map"] = torch.float32, 256
        for source, (dtype, size) in wanted.items():
            entry = entries.get(source)
            # Codes are counted in bytes, whatever integer dtype they are stored as.
            nbytes = size if source == name else size * dtype.itemsize
            if entry is None or (entry.dtype, entry.nbytes) != (dtype, nbytes):
                actual = "absent" if entry is None else f"{NAME_OF[entry.dtype]} {entry.shape}"
                message = (
                    f"{source!r} is {actual}, and {name!r} in 4 bits of shape {self.shape} has"
                    f" {size} elements of {NAME_OF[dtype]} there: the files are damaged, or were"
                    " not written by bitsandbytes. Take the original."
                )
                raise StoreFormatError(message)
        self.sources = (*wanted, name + STATE + kind)
        # Copies, because `read` may return the mapped memory of a file.
        self._table = read(f"{name}.quant_map").clone()
        self._nested: NestedScales | None = None
        if is_nested:
            scales, table = (read(f"{name}.{k}") for k in ("nested_absmax", "nested_quant_map"))
            offset, block = float(facts["nested_offset"]), facts["nested_blocksize"]
            self._nested = NestedScales(scales.reshape(-1).clone(), table.clone(), offset, block)

    def _blocks(self, start: int, stop: int) -> tuple[int, int, int]:
        """Return the first block with an element of the rows, the one after the last, and a skip.

        The skip is of elements of the first block that are of rows before.
        """
        columns = self.shape[1]
        first = start * columns // self._block
        return first, -(-stop * columns // self._block), start * columns - first * self._block

    def parts(self, start: int, stop: int) -> list[CodedPart]:
        """Return the codes and the scales of the blocks that the rows are in."""
        first, last, _ = self._blocks(start, stop)
        begin, count = first * self._block, math.prod(self.shape)
        # A tensor with an odd number of elements uses half of its last byte.
        codes = (min(last * self._block, count) - begin + 1) // 2
        scales, dtype = f"{self.sources[0]}.{self._scales[0]}", self._scales[1]
        return [
            CodedPart(self.sources[0], Entry(torch.uint8, (codes,), begin // 2)),
            CodedPart(scales, Entry(dtype, (last - first,), first * dtype.itemsize)),
        ]

    def decode(
        self, parts: Sequence[torch.Tensor], start: int, stop: int, into: torch.Tensor
    ) -> None:
        """Multiply the table's values and the blocks' scales."""
        first, _, skip = self._blocks(start, stop)
        codes, scales = parts
        if self._nested is not None:
            scales = dequantize_scales(scales, self._nested, first)
        blocks = Blocks(codes, scales.float(), self._table, self._block)
        dequantize_blocks(blocks, into, skip)


class CodedStack(CodedWeight):
    """A tensor whose rows are made of coded matrices, one after the other: stacked experts."""

    def __init__(self, shape: tuple[int, ...], matrices: Sequence[CodedWeight]) -> None:
        """Join the ``matrices``, of which each row of ``shape`` has as many."""
        self.shape = shape
        self.sources = tuple(source for matrix in matrices for source in matrix.sources)
        self._matrices = matrices

    def parts(self, start: int, stop: int) -> list[CodedPart]:
        """Return what is read for the rows' matrices, as many parts for each row."""
        return [part for m in self._of_rows(start, stop) for part in m.parts(0, m.shape[0])]

    def decode(
        self, parts: Sequence[torch.Tensor], start: int, stop: int, into: torch.Tensor
    ) -> None:
        """Compute the values of one matrix after the other."""
        values, at, left = into.view(-1), 0, list(parts)
        for matrix in self._of_rows(start, stop):
            count, rows = math.prod(matrix.shape), matrix.shape[0]
            pieces = [left.pop(0) for _ in matrix.parts(0, rows)]
            matrix.decode(pieces, 0, rows, values[at : at + count].view(matrix.shape))
            at += count

    def _of_rows(self, start: int, stop: int) -> Sequence[CodedWeight]:
        of_row = len(self._matrices) // self.shape[0]
        return self._matrices[start * of_row : stop * of_row]


def _facts(name: str, text: bytes) -> dict[str, Any]:
    """Return what bitsandbytes has noted of a weight; raise StoreFormatError if it is not that."""
    try:
        facts = json.loads(text)
        shape, sizes = facts["shape"], [facts["blocksize"]]
        if "nested_blocksize" in facts:
            sizes.append(facts["nested_blocksize"])
            float(facts["nested_offset"])
        is_whole = all(type(n) is int and n > 0 for n in (*shape, *sizes))
        # A byte has two codes, so a block of an odd size would begin inside of one.
        is_possible = is_whole and len(shape) == 2 and facts["blocksize"] % 2 == 0
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        is_possible, facts = False, {"error": repr(error)}
    if not is_possible:
        message = (
            f"The state of {name!r} in 4 bits cannot be read ({facts}): the files are damaged, or"
            " were not written by bitsandbytes. Take the original."
        )
        raise StoreFormatError(message)
    typed: dict[str, Any] = facts
    return typed


@dataclass(frozen=True, eq=False, slots=True)
class PlacedCodes:
    """Rows of a coded weight, and the places of what is read for them in a buffer."""

    weight: CodedWeight
    start: int
    stop: int
    places: Sequence[tuple[int, Entry]]

    def decode(self, memory: Memory, into: torch.Tensor) -> None:
        """Compute the values of what was read to a buffer."""
        parts = [memory(at, math.prod(e.shape), e.dtype).view(e.shape) for at, e in self.places]
        self.weight.decode(parts, self.start, self.stop, into)

    def expert(self, row: int) -> "PlacedCodes":
        """Return one row of a stack."""
        parts = len(self.places) // (self.stop - self.start)
        begin = (row - self.start) * parts
        return PlacedCodes(self.weight, row, row + 1, self.places[begin : begin + parts])


def entry_in_file(part: CodedPart, whole: Entry) -> Entry:
    """Return a part's entry with its offset in the file that has the ``whole`` tensor."""
    return replace(part.entry, offset=whole.offset + part.entry.offset)
