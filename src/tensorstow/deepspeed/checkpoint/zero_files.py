"""The files of DeepSpeed's own ZeRO checkpoints, and which elements of a parameter they hold.

[Note: Layouts] Every rank of a ZeRO run wrote the elements that it updated, in fp32 and flat.

* Stages 1 and 2: a parameter group is one flat tensor of all its parameters, one after the other,
  padded at its end and cut into one part per rank. ``mp_rank_00_model_states.pt`` has the whole
  16-bit weights.
* Stage 3: every parameter is cut into one part per rank, padded at the end of the last one; a rank
  has its parts of a (sub-)group one after the other. There are no whole weights.
* A universal checkpoint has a folder ``zero/<name>`` for each parameter, with whole tensors.

In all of them ``param_shapes`` has the names in the order of the flat tensors. Files are mapped:
a rank reads the elements that it takes.
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch.serialization import safe_globals

from tensorstow.base.directories import path_inside
from tensorstow.base.errors import StoreFormatError
from tensorstow.base.regular_file import check_regular
from tensorstow.checkpoint.torch_file import load_torch_file
from tensorstow.doorkit.checkpoint_checks import reading

FP32 = "fp32"
UNIVERSAL_MAIN = "mp_rank_00_model_states.pt"
"""The file to whose digests ds_to_universal of this project writes a list."""
_OPTIMIZER = "optimizer_state_dict"
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


class PickledValue:
    """Stands in for an object of DeepSpeed's: has its attributes, and none of its code."""

    def __init__(self, *args: Any) -> None:
        self.args = args


_STOOD_IN = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def read_file(file: Path) -> Any:
    """Return what a file of DeepSpeed's holds, its tensors mapped; no code of a file is run.

    Raises StoreFormatError for an object of a class that may not be harmless, and for a damaged
    file.
    """
    harmless: list[Any] = [(PickledValue, name) for name in _STOOD_IN]
    with reading(file), safe_globals([*harmless, Namespace]):
        try:
            return load_torch_file(file, maps=True)
        except UnpicklingError as error:
            named = re.search(r"GLOBAL (\S+)", str(error))
            if named is None:
                raise
            message = (
                f"{file} has an object of {named[1]}, whose code would run to read it: only tensors"
                " and plain values are taken. If the file is one that you trust, name the class to"
                " torch.serialization.add_safe_globals(), or save the checkpoint without it."
            )
            raise StoreFormatError(message) from error


def read_dict(file: Path, key: str) -> dict[str, Any]:
    """Return the dict in a file; raises StoreFormatError if it lacks ``key``."""
    content: Any = read_file(file)
    if not isinstance(content, dict) or key not in content:
        message = f'{file} has no "{key}", as such a file of a DeepSpeed checkpoint has.'
        raise StoreFormatError(message)
    return content


@dataclass(frozen=True, eq=False, slots=True)
class Fragment:
    """Elements of a parameter, one after the other, in a flat tensor of a file."""

    start: int
    values: torch.Tensor


@dataclass(frozen=True, eq=False, slots=True)
class SavedGroup:
    """A parameter group of the optimizer that was saved."""

    names: frozenset[str]
    values: Mapping[str, Any]
    """Its hyper-parameters; empty if the files have none."""


@dataclass(frozen=True, eq=False, slots=True)
class Partitions:
    """Trained weights and their states, each in the fragments that the ranks wrote."""

    shapes: dict[str, torch.Size]
    fragments: dict[str, dict[str, list[Fragment]]]
    """Fragments by the weight's name, then by "fp32" or a state's name."""
    steps: dict[str, float] = field(default_factory=dict)
    """Number of updates of each parameter that has states."""
    groups: list[SavedGroup] = field(default_factory=list)
    scaler: PickledValue | None = None

    def whole(self, name: str, key: str) -> torch.Tensor:
        """Return the whole fp32 weight or state of a parameter.

        It is a view of a mapped file if one fragment has all of it. Raises StoreFormatError if
        elements are missing.
        """
        return joined(self.fragments[name][key], self.shapes[name], f"{key} of {name}")


def joined(fragments: Sequence[Fragment], shape: torch.Size, name: str) -> torch.Tensor:
    """Return the tensor with these elements; a view if one fragment has all of them."""
    check_whole(fragments, shape, name)
    if len(fragments) == 1:
        return fragments[0].values.view(shape)
    flat = torch.empty(shape.numel(), dtype=fragments[0].values.dtype)
    for fragment in fragments:
        flat[fragment.start : fragment.start + fragment.values.numel()] = fragment.values
    return flat.view(shape)


def check_whole(fragments: Sequence[Fragment], shape: torch.Size, name: str) -> None:
    """Raise StoreFormatError unless the fragments have all elements of a tensor."""
    count = sum(fragment.values.numel() for fragment in fragments)
    if count != shape.numel():
        message = (
            f"{name} has {shape.numel()} elements, of which the files hold {count}: a file of a"
            " rank is missing, or of another checkpoint."
        )
        raise StoreFormatError(message)


def model_files(folder: Path) -> list[Path]:
    """Return the files of weights and counters, in the order of ranks; none without a checkpoint.

    Raises StoreFormatError for a model that was cut over ranks (tensor or pipeline parallelism).
    """
    return _by_rank(folder, _MODEL_FILE)


def optimizer_files(folder: Path) -> list[Path]:
    """Return the files of optimizer states, in the order of ranks."""
    return _by_rank(folder, _OPTIMIZER_FILE)


def _by_rank(folder: Path, names: re.Pattern[str]) -> list[Path]:
    file_of_rank: dict[int, Path] = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        match = names.fullmatch(file.name)
        if match is not None:
            if int(match[2]) > 0:
                message = (
                    f"{file} is of a model that tensor or pipeline parallelism had cut: only"
                    " checkpoints of data-parallel ranks can be loaded."
                )
                raise StoreFormatError(message)
            file_of_rank[int(match[1] or 0)] = file
    if sorted(file_of_rank) != list(range(len(file_of_rank))):
        message = (
            f"{folder} has files of the ranks {sorted(file_of_rank)}: copy those of all ranks into"
            " one directory."
        )
        raise StoreFormatError(message)
    return [file_of_rank[rank] for rank in range(len(file_of_rank))]


def partitions_of(folder: Path, models: Sequence[Mapping[str, Any]]) -> Partitions:
    """Return where the trained weights and states of a checkpoint are.

    ``models`` has what the files of weights hold. Raises StoreFormatError for a checkpoint whose
    layout is not known.
    """
    shapes: Any = models[0].get("param_shapes")
    if shapes is None:
        message = (
            f"{folder} was saved by DeepSpeed under stage 0, which has no ZeRO partitions: its"
            " states cannot be distinguished. Load it with load_optimizer_states=False."
        )
        raise StoreFormatError(message)
    shapes = [shapes] if isinstance(shapes, Mapping) else list(shapes)
    if (folder / "zero").is_dir():  # DeepSpeed's ds_to_universal wrote it
        return _universal(folder / "zero", shapes)
    files = optimizer_files(folder)
    wanted = models[0].get("dp_world_size", len(files))
    if len(files) != wanted:
        message = (
            f"{folder} has *_optim_states.pt of {len(files)} ranks and was saved by {wanted}: copy"
            " those of all ranks into one directory."
        )
        raise StoreFormatError(message)
    ranks = [read_dict(file, _OPTIMIZER)[_OPTIMIZER] for file in files]
    if "fp32_flat_groups" in ranks[0]:
        return _stage_3(folder, ranks, shapes)
    return _stages_1_and_2(ranks, shapes)


def _stages_1_and_2(
    ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, torch.Size]]
) -> Partitions:
    partitions = _empty(shapes, ranks[0].get("loss_scaler"))
    base = ranks[0]["base_optimizer_state"]
    is_elastic = not isinstance(base, Mapping)
    saved = [] if is_elastic else base["param_groups"]
    for number, group in enumerate(shapes):
        states = [_states_of(rank["base_optimizer_state"], number) for rank in ranks]
        parts = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
        part_elements = parts[0].numel()  # all parts have as many, but for the last one's padding
        flats_of = {FP32: parts, **{k: [state[k] for state in states] for k in _flat(states[0])}}
        start = 0
        for name, shape in group.items():
            stop = start + shape.numel()
            for key, flats in flats_of.items():
                partitions.fragments[name][key] = _cut(flats, part_elements, start, stop)
            start = stop
        fallbacks = [ranks[0].get("base_optimizer_state_step"), *saved]
        _tell_steps(partitions, group, states[0], fallbacks)
    _tell_groups(partitions, saved, shapes)
    return partitions


def _cut(flats: Sequence[torch.Tensor], elements: int, start: int, stop: int) -> list[Fragment]:
    """Return the elements from ``start`` to ``stop`` of a tensor cut into parts of ``elements``."""
    fragments = []
    for rank, flat in enumerate(flats):
        begin = rank * elements
        first, end = max(start, begin), min(stop, begin + flat.numel())
        if first < end:
            values = flat.detach()[first - begin : end - begin]
            fragments.append(Fragment(first - start, values))
    return fragments


def _stage_3(
    folder: Path, ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, torch.Size]]
) -> Partitions:
    partitions = _empty(shapes, ranks[0].get("loss_scaler"))
    saved = ranks[0][_OPTIMIZER]["param_groups"]
    for number, group in enumerate(shapes):
        states = [_states_of(rank[_OPTIMIZER], number) for rank in ranks]
        parts = [rank["fp32_flat_groups"][number] for rank in ranks]
        if any(part is None or part.numel() == 0 for part in parts):
            message = (
                f"{folder} has no fp32 weights of a group: they were on NVMe, and DeepSpeed wrote"
                " them to offloaded_tensors/. Save it from a run without offload to nvme."
            )
            raise StoreFormatError(message)
        flats_of = {FP32: parts, **{k: [state[k] for state in states] for k in _flat(states[0])}}
        offset = 0
        for name, shape in group.items():
            share = -(-shape.numel() // len(ranks))
            for key, flats in flats_of.items():
                shares = [flat.detach()[offset : offset + share] for flat in flats]
                partitions.fragments[name][key] = _cut(shares, share, 0, shape.numel())
            offset += share
        _tell_steps(partitions, group, states[0], saved)
    _tell_groups(partitions, saved, shapes)
    return partitions


def _universal(folder: Path, shapes: Sequence[Mapping[str, torch.Size]]) -> Partitions:
    common = read_dict(folder / "optimizer_state.pt", "param_groups")
    partitions = _empty(shapes, common.get("loss_scaler"))
    for number, group in enumerate(shapes):
        for name in group:
            step: Any = None
            for file in sorted(path_inside(folder, name, folder.parent).glob("*.pt")):
                check_regular(file)
                saved: Any = read_file(file)
                if file.stem == "step":
                    step = saved
                else:
                    whole = saved["param"] if isinstance(saved, Mapping) else saved
                    partitions.fragments[name][file.stem] = [
                        Fragment(0, whole.detach().reshape(-1))
                    ]
            state = {"step": step} if step is not None else _states_of(common[_OPTIMIZER], number)
            if len(partitions.fragments[name]) > 1:
                partitions.steps[name] = float(state["step"])
    _tell_groups(partitions, common["param_groups"], shapes)
    return partitions


def _empty(shapes: Sequence[Mapping[str, torch.Size]], scaler: PickledValue | None) -> Partitions:
    whole = {name: torch.Size(shape) for group in shapes for name, shape in group.items()}
    return Partitions(whole, {name: {} for name in whole}, scaler=scaler)


def _states_of(base: Any, number: int) -> Mapping[str, Any]:
    """Return the states of a group; an elastic checkpoint has them in a list."""
    states = base["state"].get(number, {}) if isinstance(base, Mapping) else base[number]
    of_group: Mapping[str, Any] = states
    return of_group


def _flat(states: Mapping[str, Any]) -> list[str]:
    """Return the names of states with one element for each element of the weight."""
    return [k for k, v in states.items() if isinstance(v, torch.Tensor) and v.ndim == 1]


def _tell_steps(
    partitions: Partitions,
    group: Mapping[str, Any],
    states: Mapping[str, Any],
    fallbacks: Sequence[Any],
) -> None:
    """Record the updates of a group's parameters; old versions count them in another place."""
    if not _flat(states):
        return
    counted = [states, *fallbacks]
    steps = [holder.get("step") if isinstance(holder, Mapping) else holder for holder in counted]
    step = next((float(step) for step in steps if step is not None), 0.0)
    partitions.steps.update(dict.fromkeys(group, step))


def _tell_groups(
    partitions: Partitions, saved: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]
) -> None:
    """Record the groups; stage 3 cuts one into several, whose numbers are its params."""
    if not saved:
        partitions.groups.extend(SavedGroup(frozenset(group), {}) for group in shapes)
    for values in saved:
        names = frozenset(name for number in values["params"] for name in shapes[number])
        partitions.groups.append(SavedGroup(names, values))
