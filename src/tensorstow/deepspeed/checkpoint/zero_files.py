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
from zipfile import is_zipfile

import torch
from torch.serialization import safe_globals

from tensorstow.base.errors import StoreFormatError

FP32 = "fp32"
_OPTIMIZER = "optimizer_state_dict"
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")


class PickledValue:
    """Stands in for an object of DeepSpeed's: has its attributes, and none of its code."""

    def __init__(self, *args: Any) -> None:  # noqa: ANN401  # an enum's value
        """Keep the arguments of a class that is called."""
        self.args = args


_STOOD_IN = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


def read_file(file: Path) -> Any:  # noqa: ANN401  # universal checkpoints have lone tensors
    """Return what a file of DeepSpeed's holds, its tensors mapped; no code of a file is run.

    Raises StoreFormatError for an object of a class that is not known to be harmless, and for a
    file that is damaged.
    """
    known: list[Any] = [(PickledValue, name) for name in _STOOD_IN]
    try:
        with safe_globals([*known, Namespace]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what reading damaged bytes raises may be of any kind
        named = re.search(r"GLOBAL (\S+)", str(error))
        if not isinstance(error, UnpicklingError) or named is None:
            message = (
                f"{file} cannot be read: it is damaged, cut short, or no file of torch.save()."
            )
            raise StoreFormatError(message) from error
        message = (
            f"{file} has an object of {named[1]}, whose code would run to read it: only tensors and"
            " plain values are taken. If the file is one that you trust, name the class to"
            " torch.serialization.add_safe_globals(), or save the checkpoint without it."
        )
        raise StoreFormatError(message) from error


def read_dict(file: Path, key: str) -> dict[str, Any]:
    """Return what a file holds that has ``key``; raises StoreFormatError where it has not."""
    found: Any = read_file(file)
    if not isinstance(found, dict) or key not in found:
        message = f'{file} has no "{key}", as such a file of a DeepSpeed checkpoint has.'
        raise StoreFormatError(message)
    return found


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
    """Its hyper-parameters; empty where the files have none."""


@dataclass(frozen=True, eq=False, slots=True)
class Partitions:
    """Trained weights and their states, each in the fragments that the ranks wrote."""

    shapes: dict[str, torch.Size]
    fragments: dict[str, dict[str, list[Fragment]]]
    """By name, then "fp32" or a state's name."""
    steps: dict[str, float] = field(default_factory=dict)
    """Updates of each parameter; none for one that has no states."""
    groups: list[SavedGroup] = field(default_factory=list)
    scaler: PickledValue | None = None

    def whole(self, name: str, key: str) -> torch.Tensor:
        """Return the whole fp32 weight or state of a parameter.

        A view of a mapped file where one fragment has all of it. Raises StoreFormatError where
        elements are missing.
        """
        return joined(self.fragments[name][key], self.shapes[name], f"{key} of {name}")


def joined(fragments: Sequence[Fragment], shape: torch.Size, what: str) -> torch.Tensor:
    """Return the tensor of which these are the elements; a view of one that has all."""
    there = sum(fragment.values.numel() for fragment in fragments)
    if there != shape.numel():
        message = (
            f"{what} has {shape.numel()} elements, of which the files hold {there}: a file of a"
            " rank is missing, or of another checkpoint."
        )
        raise StoreFormatError(message)
    if len(fragments) == 1:
        return fragments[0].values.view(shape)
    flat = torch.empty(shape.numel(), dtype=fragments[0].values.dtype)
    for fragment in fragments:
        flat[fragment.start : fragment.start + fragment.values.numel()] = fragment.values
    return flat.view(shape)


def model_files(folder: Path) -> list[Path]:
    """Return the files of weights and counters, in the order of ranks; none: it is no checkpoint.

    Raises StoreFormatError for a model that was cut over ranks (tensor or pipeline parallelism).
    """
    return _by_rank(folder, _MODEL_FILE)


def optimizer_files(folder: Path) -> list[Path]:
    """Return the files of optimizer states, in the order of ranks."""
    return _by_rank(folder, _OPTIMIZER_FILE)


def _by_rank(folder: Path, names: re.Pattern[str]) -> list[Path]:
    found: dict[int, Path] = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        match = names.fullmatch(file.name)
        if match is not None:
            if int(match[2]) > 0:
                message = (
                    f"{file} is of a model that tensor or pipeline parallelism had cut: only"
                    " checkpoints of data-parallel ranks are read."
                )
                raise StoreFormatError(message)
            found[int(match[1] or 0)] = file
    if sorted(found) != list(range(len(found))):
        message = (
            f"{folder} has files of the ranks {sorted(found)}: copy those of all ranks into one"
            " directory."
        )
        raise StoreFormatError(message)
    return [found[rank] for rank in range(len(found))]


def is_universal(folder: Path) -> bool:
    """Return whether a checkpoint is one that DeepSpeed's ds_to_universal wrote."""
    return (folder / "zero").is_dir()


def partitions_of(folder: Path, models: Sequence[Mapping[str, Any]]) -> Partitions:
    """Return where the trained weights and states of a checkpoint are.

    ``models`` has what the files of weights hold. Raises StoreFormatError for a checkpoint whose
    layout is not known.
    """
    shapes: Any = models[0].get("param_shapes")
    if shapes is None:
        message = (
            f"{folder} was saved by DeepSpeed under stage 0, which has no ZeRO partitions: its"
            " states cannot be told apart. Load it with load_optimizer_states=False."
        )
        raise StoreFormatError(message)
    shapes = [shapes] if isinstance(shapes, Mapping) else list(shapes)
    if is_universal(folder):
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
    found = _empty(shapes, ranks[0].get("loss_scaler"))
    base = ranks[0]["base_optimizer_state"]
    is_elastic = not isinstance(base, Mapping)
    saved = [] if is_elastic else base["param_groups"]
    for number, group in enumerate(shapes):
        states = [_states_of(rank["base_optimizer_state"], number) for rank in ranks]
        parts = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
        each = parts[0].numel()  # padding is in the last one's, which may lack it
        kept = {FP32: parts, **{key: [state[key] for state in states] for key in _flat(states[0])}}
        start = 0
        for name, shape in group.items():
            stop = start + shape.numel()
            for key, flats in kept.items():
                found.fragments[name][key] = _cut(flats, each, start, stop)
            start = stop
        _tell_steps(found, group, states[0], [ranks[0].get("base_optimizer_state_step"), *saved])
    _tell_groups(found, saved, shapes)
    return found


def _cut(flats: Sequence[torch.Tensor], each: int, start: int, stop: int) -> list[Fragment]:
    """Return the elements from ``start`` to ``stop`` of a tensor that is cut into parts."""
    fragments = []
    for rank, flat in enumerate(flats):
        first, end = max(start, rank * each), min(stop, rank * each + flat.numel())
        if first < end:
            own = flat.detach()[first - rank * each : end - rank * each]
            fragments.append(Fragment(first - start, own))
    return fragments


def _stage_3(
    folder: Path, ranks: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, torch.Size]]
) -> Partitions:
    found = _empty(shapes, ranks[0].get("loss_scaler"))
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
        kept = {FP32: parts, **{key: [state[key] for state in states] for key in _flat(states[0])}}
        offset = 0
        for name, shape in group.items():
            each = -(-shape.numel() // len(ranks))
            for key, flats in kept.items():
                own = [flat.detach()[offset : offset + each] for flat in flats]
                found.fragments[name][key] = _cut(own, each, 0, shape.numel())
            offset += each
        _tell_steps(found, group, states[0], saved)
    _tell_groups(found, saved, shapes)
    return found


def _universal(folder: Path, shapes: Sequence[Mapping[str, torch.Size]]) -> Partitions:
    common = read_dict(folder / "optimizer_state.pt", "param_groups")
    found = _empty(shapes, common.get("loss_scaler"))
    for number, group in enumerate(shapes):
        for name in group:
            step: Any = None
            for file in sorted((folder / name).glob("*.pt")):
                saved: Any = read_file(file)
                if file.stem == "step":
                    step = saved
                else:
                    whole = saved["param"] if isinstance(saved, Mapping) else saved
                    found.fragments[name][file.stem] = [Fragment(0, whole.detach().reshape(-1))]
            state = {"step": step} if step is not None else _states_of(common[_OPTIMIZER], number)
            if len(found.fragments[name]) > 1:
                found.steps[name] = float(state["step"])
    _tell_groups(found, common["param_groups"], shapes)
    return found


def _empty(shapes: Sequence[Mapping[str, torch.Size]], scaler: PickledValue | None) -> Partitions:
    whole = {name: torch.Size(shape) for group in shapes for name, shape in group.items()}
    return Partitions(whole, {name: {} for name in whole}, scaler=scaler)


def _states_of(base: Any, number: int) -> Mapping[str, Any]:  # noqa: ANN401
    """Return the states of a group; an elastic checkpoint has them in a list."""
    states = base["state"].get(number, {}) if isinstance(base, Mapping) else base[number]
    found: Mapping[str, Any] = states
    return found


def _flat(states: Mapping[str, Any]) -> list[str]:
    """Return the names of states that have an element for each of the weight's."""
    return [k for k, v in states.items() if isinstance(v, torch.Tensor) and v.ndim == 1]


def _tell_steps(
    found: Partitions, group: Mapping[str, Any], states: Mapping[str, Any], others: Sequence[Any]
) -> None:
    """Note the updates of a group's parameters; old versions count them in another place."""
    if not _flat(states):
        return
    counted = [states, *others]
    steps = [each.get("step") if isinstance(each, Mapping) else each for each in counted]
    step = next((float(step) for step in steps if step is not None), 0.0)
    found.steps.update(dict.fromkeys(group, step))


def _tell_groups(
    found: Partitions, saved: Sequence[Mapping[str, Any]], shapes: Sequence[Mapping[str, Any]]
) -> None:
    """Note the groups; stage 3 cuts one into several, whose numbers are its params."""
    if not saved:
        found.groups.extend(SavedGroup(frozenset(group), {}) for group in shapes)
    for values in saved:
        names = frozenset(name for number in values["params"] for name in shapes[number])
        found.groups.append(SavedGroup(names, values))
