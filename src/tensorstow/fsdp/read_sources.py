"""Units of a model that is only read, and the sources of their weights: files, or host memory.

[Note: Parts of the root] What is in no block (embeddings, the last norm, the head) is one unit in
training, unsharded for the whole forward. To read it, it is cut: each module with parameters of its
own is a unit, together with those that share one with it. A plan names such a unit by its module,
or all of them by the name of the root, "".

[Note: Experts] A module that has the weights of all experts of a layer, as stacked tensors, is a
unit of its own inside of its block. Its call is told which experts tokens are routed to, and those
alone are read.

Each unit that is read or copied before use has a layout of its parameters in a buffer, and the
modules that get them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from tensorstow.base.budget import Budget
from tensorstow.base.plan import Plan
from tensorstow.base.sizes import round_up
from tensorstow.base.tiers import Tier
from tensorstow.checkpoint.coded_weights import CodedStack, CodedWeight, PlacedCodes
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.weight_files import WeightFile, WeightFiles
from tensorstow.fsdp.experts import take_experts
from tensorstow.fsdp.initialization import InitialValues
from tensorstow.fsdp.units import ROOT, Unit, units_of
from tensorstow.fsdp.weight_stream import FileTensor, StreamedUnit
from tensorstow.io.arena import PAGE
from tensorstow.io.device_link import DeviceLink, is_away
from tensorstow.io.file_runs import BufferLayout, runs_of
from tensorstow.io.pinned import PinnedBlock
from tensorstow.io.safetensors import Entry
from tensorstow.nn.routed_experts import is_of_experts
from tensorstow.tensors.placeholder import AbsentWeight

_Piece = tuple[WeightFile, Entry]
"""A tensor in a file, whose bytes are those of a parameter, or of a part of it."""


@dataclass(frozen=True, eq=False, slots=True)
class ReadUnit(Unit):
    """Parameters that are read and used together; its name is that of its first module."""

    modules: Sequence[nn.Module]
    """Those that use the parameters when they run."""
    part_of: str | None = None
    """The name of the unit that it is a part of in training."""

    def tier_in(self, plan: Plan) -> Tier:
        """Return its tier in a plan, which names it or the unit that it is a part of."""
        is_named = self.part_of is None or self.name in plan.parameter_units
        return plan.tier_of(self.name if is_named else str(self.part_of))

    @property
    def experts(self) -> int:
        """How many experts its tensors stack; 0: it is no unit of experts."""
        is_stacked = len(self.modules) == 1 and is_of_experts(self.module)
        return len(next(iter(self.parameters.values()))) if is_stacked else 0


def read_units_of(model: nn.Module, blocks: Sequence[nn.Module] | None = None) -> list[ReadUnit]:
    """Return the units of a model that is only read, in the order of definition.

    Every parameter is in one of them. ``blocks``: as of ``units_of``.
    """
    *units, root = units_of(model, blocks)
    parts = _parts_of(model, root)
    blocks_read = [part for unit in units for part in _without_experts(unit)]
    order = {name: at for at, (name, _) in enumerate(model.named_modules())}
    return sorted([*blocks_read, *parts], key=lambda unit: order[unit.name])


def parents_of(units: Sequence[ReadUnit]) -> dict[str, list[str]]:
    """Return, by unit, the names of the units whose modules contain it."""
    inside: dict[str, list[str]] = {unit.name: [] for unit in units}
    for outer in units:
        below = {id(m) for module in outer.modules for m in module.modules()}
        for unit in units:
            if unit is not outer and any(id(module) in below for module in unit.modules):
                inside[unit.name].append(outer.name)
    return inside


def _without_experts(unit: Unit) -> list[ReadUnit]:
    """Return a block without its experts, and each module of experts."""
    rest = replace(unit, parameters=dict(unit.parameters))
    experts = [
        ReadUnit(taken.name, taken.module, taken.parameters, [taken.module], unit.name)
        for taken in take_experts(rest)
    ]
    block = ReadUnit(unit.name, unit.module, rest.parameters, [unit.module])
    return [block, *experts] if rest.parameters else experts


def _parts_of(model: nn.Module, root: Unit) -> list[ReadUnit]:
    """Return the units that the root is cut into."""
    rest = {id(p) for p in root.parameters.values()}
    groups: list[tuple[set[int], list[tuple[str, nn.Module]]]] = []
    for name, module in model.named_modules():
        mine = {id(p) for p in module.parameters(recurse=False)} & rest
        if not mine:
            continue
        # A module that shares parameters with several groups makes one of them.
        shared = [group for group in groups if group[0] & mine]
        groups = [group for group in groups if group not in shared]
        members = mine.union(*(ids for ids, _ in shared))
        groups.append((members, [named for _, modules in shared for named in modules]))
        groups[-1][1].append((name, module))
    return [
        ReadUnit(
            *modules[0],
            {n: p for n, p in root.parameters.items() if id(p) in members},
            [module for _, module in modules],
            ROOT,
        )
        for members, modules in groups
    ]


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
        # A parameter that is computed from other tensors is in no file as it is.
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
        # Decoded values come after all that is read: no file has them.
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
            # Readers return values in the dtype that a parameter has.
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
