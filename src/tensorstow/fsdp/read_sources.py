"""Where the weights of a model that is only read come from: its files, or host memory.

For each unit that is read or copied before use: the layout of its parameters in a buffer, and the
modules that get them.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tensorstow.base.budget import Budget
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import round_up
from tensorstow.checkpoint.coded_weights import CodedStack, CodedWeight, PlacedCodes
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.weight_files import WeightFile, WeightFiles
from tensorstow.fsdp.initialization import Init, InitialValues
from tensorstow.fsdp.read_units import ReadUnit
from tensorstow.fsdp.weight_stream import FileTensor, StreamedUnit
from tensorstow.io.arena import PAGE
from tensorstow.io.device_link import DeviceLink, is_away
from tensorstow.io.file_runs import BufferLayout, runs_of
from tensorstow.io.pinned import PinnedBlock
from tensorstow.io.safetensors import Entry
from tensorstow.tensors.placeholder import AbsentWeight

_Piece = tuple[WeightFile, Entry]
"""A tensor in a file, whose bytes are those of a parameter, or of a part of it."""


@dataclass(frozen=True, eq=False, slots=True)
class ReadOptions:
    """The user's options for a model that is only read."""

    plan: Plan | None
    """None: units stay in memory as far as there is room."""
    budget: Budget | None
    """The bytes of memory for weights, without a plan; None: parts of what this machine has."""
    compute_dtype: torch.dtype | None
    """The dtype of floating-point parameters; None: as the model has them."""
    blocks: Sequence[nn.Module] | None
    """Modules that are units; None: the model's repeated blocks."""
    weights: str | os.PathLike[str] | None
    """Safetensors with the model's values; None: it has its own."""
    init: Init | None
    """Computes the buffers of a module on the meta device."""
    device: torch.device
    """The device that computes."""

    @property
    def is_away(self) -> bool:
        """Return whether the device that computes has memory of its own."""
        return is_away(self.device)

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        """Return the dtype that a parameter is computed with."""
        if self.compute_dtype is None or not parameter.is_floating_point():
            return parameter.dtype
        return self.compute_dtype

    def bytes_of(self, unit: ReadUnit) -> int:
        """Return the bytes of a unit in the dtypes that are computed with."""
        return sum(p.numel() * self.dtype_of(p).itemsize for p in unit.parameters.values())


class Sources:
    """Units as they can be read, and read-only memory for those in host memory."""

    def __init__(self, model: nn.Module, values: InitialValues, options: ReadOptions) -> None:
        """Find each parameter in modules and in the files; read none."""
        self.values = values
        self._options = options
        files = values.files
        self._opened = None if files is None else WeightFiles(files.paths)
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, parameter in module._parameters.items():  # noqa: SLF001  # tied ones too
                self._places.setdefault(id(parameter), []).append((module, name))

    def in_files(self, unit: ReadUnit) -> StreamedUnit | None:
        """Return a unit as it is read from its files; None: it cannot be read from them."""
        files = self.values.files
        if files is None or self._opened is None:
            return None
        read = {n: p for n, p in unit.parameters.items() if self.values.in_files(n)}
        origins = {n: files.origin(self.values.names_of(n), p) for n, p in read.items()}
        for origin in origins.values():
            if origin.make is not None and not origin.pieces and origin.coded is None:
                return None
        codes = {
            name: (origin.coded, files.parts(origin.coded, 0, read[name].shape[0]))
            for name, origin in origins.items()
            if origin.coded is not None and read[name].is_floating_point()
        }
        located: list[tuple[str, list[_Piece]]] = []
        for name, origin in origins.items():
            if name in codes:
                _, parts = codes[name]
                located += [(name, [(self._opened.by_path[path], part)]) for path, part in parts]
            else:
                located.append((name, self._pieces(files, origin.pieces or origin.sources[:1])))
        if any(len({entry.dtype for _, entry in pieces}) > 1 for _, pieces in located):
            return None
        return self._laid_out(unit, read, located, codes)

    def _laid_out(
        self,
        unit: ReadUnit,
        read: Mapping[str, nn.Parameter],
        located: Iterable[tuple[str, list[_Piece]]],
        codes: Mapping[str, tuple[CodedWeight, Sequence[tuple[Path, Entry]]]],
    ) -> StreamedUnit:
        """Return a unit of the tensors ``read``, with places in a buffer for what is in files.

        ``codes``: those that are stored as codes, with the parts of each in the files.
        """
        layout = BufferLayout()
        placed: dict[str, tuple[Entry, int, int | None]] = {}
        places: dict[tuple[Path, Entry], int] = {}
        stored: list[tuple[WeightFile, Entry, int]] = []
        # In the order of the files: tensors next to each other are read at once.
        for name, pieces in sorted(located, key=_place_in_files):
            entry = pieces[0][1]
            if len(pieces) > 1:
                entry = Entry(entry.dtype, tuple(read[name].shape))
            dtype = entry.dtype if name in codes else self._options.dtype_of(read[name])
            at, cast_at = layout.place(entry, dtype)
            if name in codes:
                places[pieces[0][0].path, entry] = at
            else:
                placed[name] = (entry, at, cast_at)
            for file, piece in pieces:
                stored.append((file, piece, at))
                at += piece.nbytes
        decoded: dict[str, PlacedCodes] = {}
        for name, (weight, parts) in codes.items():
            entry = Entry(self._options.dtype_of(read[name]), tuple(read[name].shape))
            at = layout.append(entry.nbytes)
            placed[name] = (entry, at, at)
            rows = 0, read[name].shape[0]
            read_to = [(places[part], part[1]) for part in parts]
            decoded[name] = PlacedCodes(weight, *rows, read_to)
        tensors = [
            replace(self._tensor(name, parameter, *placed[name]), codes=decoded.get(name))
            for name, parameter in read.items()
        ]
        are_stacks = all(isinstance(weight, CodedStack) for weight, _ in codes.values())
        nbytes, experts = round_up(layout.nbytes, PAGE), unit.experts if are_stacks else 0
        return StreamedUnit(unit.name, tensors, nbytes, runs_of(stored), experts=experts)

    def _pieces(self, files: PretrainedFiles, names: Iterable[str]) -> list[_Piece]:
        opened = {} if self._opened is None else self._opened.by_path
        paths = [(opened[files.path_of(name)], name) for name in names]
        return [(file, file.entries[name]) for file, name in paths]

    def in_host_memory(self, unit: ReadUnit, link: DeviceLink) -> StreamedUnit:
        """Return a unit whose values are in pinned host memory from now on."""
        layout = BufferLayout()
        tensors: list[FileTensor] = []
        for name, parameter in unit.parameters.items():
            dtype = self._options.dtype_of(parameter)
            parameter.data = parameter.data.to(dtype)
            entry = Entry(dtype, tuple(parameter.shape))
            at = layout.append(entry.nbytes)
            tensors.append(self._tensor(name, parameter, entry, at, None))
        memory = PinnedBlock(round_up(layout.nbytes, PAGE), link.device, link.synchronize)
        readers = self.values.readers(unit)
        for tensor in tensors:
            parameter = unit.parameters[tensor.name]
            read = readers[tensor.name](0, parameter.shape[0] if parameter.ndim else 0)
            tensor.values(memory).copy_(read.reshape(-1))
        return StreamedUnit(
            unit.name, tensors, memory.nbytes, resident=memory, experts=unit.experts
        )

    def buffer_bytes_of(self, unit: ReadUnit) -> int:
        """Return the bytes of a buffer for a unit in host memory."""
        layout = BufferLayout()
        for parameter in unit.parameters.values():
            layout.append(parameter.numel() * self._options.dtype_of(parameter).itemsize)
        return round_up(layout.nbytes, PAGE)

    def _tensor(
        self,
        name: str,
        parameter: nn.Parameter,
        entry: Entry,
        at: int,
        cast_at: int | None,
    ) -> FileTensor:
        dtype, device = self._options.dtype_of(parameter), self._options.device
        absent = AbsentWeight(parameter, dtype, device)
        placeholder = nn.Parameter(absent, requires_grad=False)
        return FileTensor(name, entry, placeholder, self._places[id(parameter)], at, cast_at)


def _place_in_files(located: tuple[str, Sequence[_Piece]]) -> tuple[Path, int, str]:
    name, ((file, entry), *_) = located
    return file.path, entry.offset, name
