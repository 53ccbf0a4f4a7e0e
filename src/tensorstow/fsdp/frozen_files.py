"""Finds frozen weights that stay in the user's files, and lays them out in a buffer.

[Note: Mapped weights] ``from_pretrained`` and ``torch.load(mmap=True)`` return tensors over a
private mapping of a file. Such a tensor has the file's bytes until it is written to, and no
attribute shows that. So its bytes are compared with the file's. A weight that differs is copied.
"""

import logging
import math
import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tensorstow.base.regular_file import regular_stream
from tensorstow.base.sizes import format_bytes
from tensorstow.checkpoint.coded_weights import CodedStack, CodedWeight, Memory, PlacedCodes
from tensorstow.checkpoint.weight_files import SeenFile, WeightFile, WeightFiles
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.shard_storage import FrozenLayout
from tensorstow.fsdp.units import Unit
from tensorstow.io.file_runs import BufferLayout, Run, cut_runs, runs_of
from tensorstow.io.mapped import drop_pages
from tensorstow.io.safetensors import Entry
from tensorstow.nn.routed_experts import is_of_experts
from tensorstow.tensors.dtensor import rows_of_rank, rows_per_rank

logger = logging.getLogger("tensorstow")

_PIECE = 4 << 20
"""Bytes that are compared at once."""


_Part = tuple[Path, Entry]
"""A file and bytes of it: a whole weight, one of the tensors that it consists of, or codes."""


@dataclass(frozen=True, eq=False, slots=True)
class _HeldCodes:
    """Rows of a coded weight whose codes stay in host memory."""

    weight: CodedWeight
    start: int
    stop: int
    parts: Sequence[torch.Tensor]

    def decode(self, _: Memory, into: torch.Tensor) -> None:
        """Compute the values."""
        self.weight.decode(self.parts, self.start, self.stop, into)


class _UnitDecoder:
    """Decodes the weights of a unit that are stored as codes."""

    def __init__(self) -> None:
        """Begin without weights."""
        self.held_bytes = 0
        self._coded: list[tuple[PlacedCodes | _HeldCodes, Entry]] = []

    def add(self, codes: PlacedCodes | _HeldCodes, values: Entry) -> None:
        """Decode a weight too; ``values``: the place of its rows in the buffer."""
        self._coded.append((codes, values))
        if isinstance(codes, _HeldCodes):
            self.held_bytes += sum(part.nbytes for part in codes.parts)

    def decode(self, memory: Memory, pieces: Sequence[int] | None) -> None:
        """Compute the values of all of them; ``pieces``: of these experts."""
        for codes, values in self._coded:
            flat = memory(values.offset, math.prod(values.shape), values.dtype)
            if pieces is None or isinstance(codes, _HeldCodes):
                codes.decode(memory, flat.view(values.shape))
                continue
            for expert in pieces:
                row = flat.view(values.shape)[expert : expert + 1]
                codes.expert(expert).decode(memory, row)


class FrozenFiles:
    """The frozen weights of a model's units that are in the user's files."""

    def __init__(self, units: Sequence[Unit], values: InitialValues) -> None:
        """Find each frozen weight in ``weights=``, or in the file that it is mapped from.

        ``units``: those on disk.
        """
        self._places: dict[str, Sequence[_Part]] = {}
        self._coded = values.coded(units)
        self._values = values
        self._files: Mapping[Path, WeightFile] = {}
        frozen = {
            name: parameter
            for unit in units
            for name, parameter in unit.parameters.items()
            if not parameter.requires_grad and parameter.numel() and parameter.ndim
        }
        if not frozen:
            return
        mapped = {n: p for n, p in frozen.items() if not values.in_files(n)}
        self._places |= {name: [part] for name, part in _mapped_parts(mapped).items()}
        files, mapped_paths = values.files, {path for ((path, _),) in self._places.values()}
        tables = set() if files is None else files.paths
        if tables or mapped_paths:
            self._files = WeightFiles(tables, mapped_paths).by_path
        if files is not None:
            for name in frozen.keys() - mapped.keys():
                # One that is computed from other values is in no file as it is.
                if name in self._coded:
                    continue
                origin = files.origin(values.names_of(name), frozen[name])
                sources = origin.pieces or (origin.sources if origin.make is None else ())
                paths = [files.path_of(source) for source in sources]
                entries = [self._files[p].entries[n] for p, n in zip(paths, sources, strict=True)]
                if entries and {entry.dtype for entry in entries} == {frozen[name].dtype}:
                    self._places[name] = list(zip(paths, entries, strict=True))
        in_files = self._places.keys() | self._coded.keys()
        _log_copied({n: p for n, p in frozen.items() if n not in in_files})

    def layout(
        self, unit: Unit, rank: int, ranks: int, *, by_experts: bool = False
    ) -> FrozenLayout:
        """Return the buffer for one rank's rows of the weights of a unit that are in files.

        ``by_experts``: a unit of experts that has all rows may be read expert by expert.
        """
        layout = BufferLayout()
        at: dict[str, int] = {}
        coded = self._parts_of(unit, rank, ranks)
        stored, places = self._place_codes(coded, layout)
        placed = [(self._places[name], name) for name in unit.parameters if name in self._places]
        # In the order of the files: weights next to each other in a file are read at once.
        for places_of, name in sorted(placed, key=lambda pair: _place_in_files(pair[0][0])):
            parameter = unit.parameters[name]
            row = parameter[:1].numel() * parameter.element_size()
            start, stop = rows_of_rank(parameter.shape[0], rank, ranks)
            rows = list(self._cut(places_of, start * row, stop * row))
            # The offset in the file lets place() put the rows so that direct I/O needs no copy.
            offset = rows[0][1].offset if rows else 0
            # The shape has room for padding, which FSDP2 gathers too.
            shape = (rows_per_rank(parameter.shape[0], ranks), *parameter.shape[1:])
            at[name], _ = layout.place(Entry(parameter.dtype, shape, offset), parameter.dtype)
            stored += [(file, entry, at[name] + begin) for file, entry, begin in rows]
        # Decoded values come after all that is read: no file has them.
        decoder = _UnitDecoder()
        for name, parts in coded.items():
            start, stop = rows_of_rank(unit.parameters[name].shape[0], rank, ranks)
            values = _append_values(layout, unit.parameters[name], rank, ranks)
            at[name] = values.offset
            codes = [(places[part], part[1]) for part in parts]
            decoder.add(PlacedCodes(self._coded[name], start, stop, codes), values)
        runs, pieces = runs_of(stored), []
        are_stacks = all(isinstance(self._coded[name], CodedStack) for name in coded)
        is_of_files = at.keys() == unit.parameters.keys() and are_stacks
        if by_experts and is_of_files and is_of_experts(unit.module):
            pieces = self._by_experts(unit, at, coded, places, runs)
        return FrozenLayout(at, layout.nbytes, runs, decoder if coded else None, pieces)

    @staticmethod
    def _by_experts(
        unit: Unit,
        at: Mapping[str, int],
        coded: Mapping[str, Sequence[_Part]],
        places: Mapping[_Part, int],
        runs: Sequence[Run],
    ) -> list[list[Run]]:
        """Return the reads of each expert of a unit that has stacks of experts alone."""
        experts: list[list[Run]] = []
        count = len(next(iter(unit.parameters.values())))
        for expert in range(count):
            spans: list[tuple[int, int]] = []
            for name, stack in unit.parameters.items():
                if name in coded:
                    # The parts of a stack are in the order of its experts, as many for each.
                    parts = len(coded[name]) // count
                    matrices = coded[name][expert * parts : (expert + 1) * parts]
                    spans += [(places[part], part[1].nbytes) for part in matrices]
                else:
                    nbytes = stack.nbytes // count
                    spans.append((at[name] + expert * nbytes, nbytes))
            experts.append([r for at_, n in spans for r in cut_runs(runs, at_, at_ + n)])
        return experts

    def _cut(
        self, places: Sequence[_Part], begin: int, end: int
    ) -> Iterator[tuple[WeightFile, Entry, int]]:
        """Yield the bytes of a weight from ``begin`` to ``end``: file, place in it, and in them."""
        at = 0
        for path, whole in places:
            start, stop = max(begin, at), min(end, at + whole.nbytes)
            if start < stop:
                bytes_ = Entry(torch.uint8, (stop - start,), whole.offset + start - at)
                yield self._files[path], bytes_, start - begin
            at += whole.nbytes

    def _parts_of(self, unit: Unit, rank: int, ranks: int) -> dict[str, list[_Part]]:
        """Return what is read of files for one rank's rows of a unit's coded weights, by name."""
        files = self._values.files
        return {
            name: files.parts(self._coded[name], *rows_of_rank(p.shape[0], rank, ranks))
            for name, p in unit.parameters.items()
            if name in self._coded and files is not None
        }

    def _place_codes(
        self, coded: Mapping[str, Sequence[_Part]], layout: BufferLayout
    ) -> tuple[list[tuple[WeightFile, Entry, int]], dict[_Part, int]]:
        """Place the codes of a unit's weights; return what is read, and the place of each part."""
        stored: list[tuple[WeightFile, Entry, int]] = []
        places: dict[_Part, int] = {}
        every = {part for parts in coded.values() for part in parts}
        for path, entry in sorted(every, key=_place_in_files):
            places[path, entry], _ = layout.place(entry, entry.dtype)
            stored.append((self._files[path], entry, places[path, entry]))
        return stored, places


def _place_in_files(part: _Part) -> tuple[Path, int]:
    path, entry = part
    return path, entry.offset


def codes_in_memory(unit: Unit, values: InitialValues, rank: int, ranks: int) -> FrozenLayout:
    """Return a buffer for the values of a unit's coded weights, whose codes are read now."""
    layout, decoder, at = BufferLayout(), _UnitDecoder(), {}
    for name, coded in values.coded([unit]).items():
        start, stop = rows_of_rank(unit.parameters[name].shape[0], rank, ranks)
        held = _append_values(layout, unit.parameters[name], rank, ranks)
        at[name] = held.offset
        files = values.files
        # These parts are mapped from the files. Their clones are what stays in memory.
        parts = [] if files is None else files.read_parts(coded, start, stop)
        decoder.add(_HeldCodes(coded, start, stop, [part.clone() for part in parts]), held)
    return FrozenLayout(at, layout.nbytes, (), decoder if at else None)


def _append_values(layout: BufferLayout, like: torch.Tensor, rank: int, ranks: int) -> Entry:
    """Return the place of one rank's rows of a weight, with room for padding after them."""
    start, stop = rows_of_rank(like.shape[0], rank, ranks)
    dtype, rest = like.dtype, like.shape[1:]
    begin = layout.append(Entry(dtype, (rows_per_rank(like.shape[0], ranks), *rest)).nbytes)
    return Entry(dtype, (stop - start, *rest), begin)


def _log_copied(copied: Mapping[str, nn.Parameter]) -> None:
    if copied:
        nbytes = sum(parameter.nbytes for parameter in copied.values())
        logger.info(
            "%s of frozen weights are copied to the directory of weights on disk, because no file"
            " has them as they are (%s, for one). To leave them in your files, pass weights= with"
            " files in the model's dtype",
            *(format_bytes(nbytes), next(iter(copied))),
        )


# --- weights that are mapped ---


def watch_mapped_files(model: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Let each forward raise DamageError if a file that frozen parameters are mapped from changed.

    Their memory is the file's: what another program writes to it is computed with from then on.
    Call it before the values are validated for the last time.
    """
    frozen = [p for p in parameters if not p.requires_grad and p.device.type == "cpu" and p.numel()]
    mappings = list(_private_mappings()) if frozen else []
    starts = [mapping.start for mapping in mappings]
    paths: set[Path] = set()
    for parameter in frozen:
        index = bisect_right(starts, parameter.data_ptr()) - 1
        if index >= 0 and parameter.data_ptr() < mappings[index].stop:
            paths.add(mappings[index].path)
    # A file may have lost its name since it was mapped.
    seen = [SeenFile.held(path) for path in sorted(paths) if path.is_file()]
    if seen:
        model.register_forward_pre_hook(_MappedFiles(seen), prepend=True)


class _MappedFiles:
    """A hook before forward that validates files."""

    def __init__(self, seen: Sequence[SeenFile] = ()) -> None:
        """Keep the files open."""
        self._seen = seen

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def __call__(self, *_: object) -> None:
        """Raise DamageError if a file was changed since."""
        for file in self._seen:
            file.validate_unchanged()

    def __reduce__(self) -> tuple[object, ...]:
        """Return a hook without files: a copied or saved model has memory of its own."""
        return _MappedFiles, ()


@dataclass(frozen=True, slots=True)
class _Mapping:
    """A line of /proc/self/maps: a part of a file in memory."""

    start: int
    stop: int
    offset: int
    """The offset of ``start`` in the file."""
    path: Path


def _mapped_parts(parameters: Mapping[str, nn.Parameter]) -> dict[str, _Part]:
    """Return the bytes of parameters that are mapped from files and have the files' bytes."""
    parts: dict[str, _Part] = {}
    mappings = list(_private_mappings()) if parameters else []
    starts = [mapping.start for mapping in mappings]
    for name, parameter in parameters.items():
        if parameter.device.type != "cpu" or not parameter.is_contiguous() or parameter.is_neg():
            continue  # with the negative bit set its values are not those of its bytes
        address = parameter.data_ptr()
        index = bisect_right(starts, address) - 1
        if index < 0 or address + parameter.nbytes > mappings[index].stop:
            continue
        mapping = mappings[index]
        offset = mapping.offset + address - mapping.start
        if not mapping.path.is_file() or not os.access(mapping.path, os.R_OK):
            continue  # the file was removed, or belongs to another namespace
        if _is_as_in_file(parameter, mapping.path, offset):
            parts[name] = mapping.path, Entry(torch.uint8, (parameter.nbytes,), offset)
    return parts


def _is_as_in_file(parameter: nn.Parameter, path: Path, offset: int) -> bool:
    """Return whether a mapped weight has the file's bytes, and release its pages."""
    flat = parameter.detach().reshape(-1).view(torch.uint8)
    with regular_stream(path) as file:
        # Piece by piece: memory holds little of a weight at a time.
        for begin in range(0, flat.numel(), _PIECE):
            piece = flat[begin : begin + _PIECE]
            stored = os.pread(file.fileno(), piece.numel(), offset + begin)
            if stored != piece.numpy().tobytes():
                return False
            drop_pages(piece)
    return True


def _private_mappings() -> Iterator[_Mapping]:
    """Yield the private mappings of files in this process, which the kernel has by address."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        addresses, modes, offset, _, inode, *rest = line.split(maxsplit=5)
        if inode != "0" and rest and modes.endswith("p"):
            start, stop = (int(number, 16) for number in addresses.split("-"))
            yield _Mapping(start, stop, int(offset, 16), Path(rest[0]))
