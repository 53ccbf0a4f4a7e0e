"""Checkpoints of an engine: sharded tensors by name, which any number of ranks can load.

[Note: Checkpoints] A folder per tag holds what ``torch.distributed.checkpoint`` writes (every rank
its own elements, no rank the whole) and ``engine.pt``, the little that is the same on every rank.
Names are the model's: ``module.<name>`` and ``optimizer.<name>.<state>``. The file ``latest`` is
replaced when all of that is there, so it never names half a checkpoint.
"""

import os
import socket
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.deepspeed.states import StatesByName, owned_names, set_states, states_of
from tensorstow.fsdp.full_tensors import host_dtensor, resharded, to_local
from tensorstow.fsdp.sharding import host_group, on_every_rank
from tensorstow.fsdp.units import aliases_of
from tensorstow.optim.placed import PlacedOptimizer, name_of_class
from tensorstow.tensors.dtensor import is_sharded, shard_of

LATEST = "latest"
_KEPT = "engine.pt"
_MODULE, _OPTIMIZER = "module.", "optimizer."
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Contents:
    """What is saved: a module with its optimizer or without one, and whether frozen weights are."""

    module: nn.Module
    optimizer: PlacedOptimizer | None
    frozen: bool = True


def save(folder: Path, contents: Contents, kept: Mapping[str, Any], *, latest: bool) -> None:
    """Write a checkpoint to ``folder``; collective.

    ``kept`` is what is the same on every rank. During the call a rank holds a copy of its weights;
    states on disk are read through a mapped file.
    """
    module, optimizer = contents.module, contents.optimizer
    tensors, named = _values_of(module), _parameters(module)
    frozen = [name for name, p in named.items() if not p.requires_grad]
    if not contents.frozen:
        for name in frozen:
            tensors.pop(_MODULE + name, None)  # a state_dict of the model's own may lack it
    states = {} if optimizer is None else states_of(module, optimizer)
    steps, numbers = _take_numbers(states, named)
    for name, entry in states.items():
        for state, values in entry.items():
            cut = to_local(values).shape == shard_of(named[name]).shape
            whole = host_dtensor(values, named[name]) if cut else values
            tensors[f"{_OPTIMIZER}{name}.{state}"] = whole
    groups = [] if optimizer is None else [dict(g) for g in optimizer.param_groups]
    names = iter([] if optimizer is None else owned_names(module, optimizer))
    for group in groups:
        group["params"] = [next(names) for _ in group["params"]]
    told: dict[str, Any] = {"groups": groups, "steps": steps, "numbers": numbers, "frozen": frozen}
    told["tied"] = aliases_of(module)
    told["class"] = None if optimizer is None else name_of_class(optimizer)
    with _quietly():
        dcp_save(tensors, checkpoint_id=folder, process_group=host_group())

    def write() -> None:
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save({**kept, **told}, folder / _KEPT)
            if latest:
                _replace(folder.parent / LATEST, folder.name)

    on_every_rank(write, f"write to {folder}")


def validate_same_folder(directory: str | os.PathLike[str], tag: str | None, call: str) -> None:
    """Raise OptionError on every rank if one has another folder: each has a part of one.

    Hosts may have the directory in different places. ``tag``: None where there is no file
    ``latest``.
    """
    group = host_group()
    if group is None:
        return
    own = (tag, socket.gethostname(), os.path.realpath(directory))
    given: list[tuple[str | None, str, str]] = [own] * dist.get_world_size(group)
    dist.all_gather_object(given, own, group=group)
    tags = [each[0] for each in given]
    if len(set(tags)) > 1:
        what, values = "tags", tags
    elif len({each[1:] for each in given}) > len({each[1] for each in given}):
        what, values = "directories", [each[2] for each in given]
    else:
        return
    message = (
        f"{call} was called with the {what} {values} on ranks 0 to {len(given) - 1}: each rank has"
        " a part of one checkpoint. Give the same tag on every rank, and a directory that all of"
        " them share."
    )
    raise OptionError(message)


def latest_tag(directory: Path) -> str | None:
    """Return the tag in ``latest``; None if nothing was saved."""
    file = directory / LATEST
    return file.read_text().strip() if file.is_file() else None


def read_common(folder: Path) -> dict[str, Any]:
    """Return what is the same on every rank; raises StoreFormatError if there is none."""
    file = folder / _KEPT
    if not file.is_file():
        message = (
            f"{folder} has no {_KEPT}: it is no checkpoint. Name a directory that"
            " save_checkpoint() wrote to, this engine's or DeepSpeed's, and a tag in it."
        )
        raise StoreFormatError(message)
    try:
        found: dict[str, Any] = torch.load(file, weights_only=True)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # what reading damaged bytes raises may be of any kind
        message = f"{file} cannot be read: it is damaged or cut short. Load another checkpoint."
        raise StoreFormatError(message) from error
    return found


def load_module(folder: Path, module: nn.Module, *, strict: bool) -> None:
    """Load the weights in ``folder`` into the module; collective.

    With ``strict`` it raises OptionError if the checkpoint has other names than the module.
    """
    there = {n.removeprefix(_MODULE) for n in _names_in(folder) if n.startswith(_MODULE)}
    tensors = _room_for(module)
    if strict and there != tensors.keys():
        missing, more = sorted(tensors.keys() - there), sorted(there - tensors.keys())
        message = (
            f"{folder} is of another model: it lacks {missing} and also has {more}. Pass"
            " load_module_strict=False to load what both have."
        )
        raise OptionError(message)
    taken = {name: values for name, values in tensors.items() if name in there}
    _read(folder, {f"{_MODULE}{name}": values for name, values in taken.items()})
    targets: Mapping[str, torch.Tensor] = {**dict(module.named_buffers()), **_parameters(module)}
    with torch.no_grad():
        for name, values in taken.items():
            to_local(targets[name]).copy_(to_local(values))


def load_states(
    folder: Path, kept: Mapping[str, Any], module: nn.Module, optimizer: PlacedOptimizer
) -> None:
    """Load the states and hyper-parameters of a checkpoint into the optimizer; collective.

    Raises OptionError if the checkpoint's groups have other parameters, or it is of another class.
    """
    theirs, ours = kept.get("class"), name_of_class(optimizer)  # older ones lack it
    if theirs not in {None, ours}:
        message = (
            f"{folder} has the states of {theirs}, and the optimizer is {ours}: create the same"
            " one, or pass load_optimizer_states=False."
        )
        raise OptionError(message)
    names = iter(owned_names(module, optimizer))
    here = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    if here != [group["params"] for group in kept["groups"]]:
        message = (
            f"{folder} has groups of {[len(g['params']) for g in kept['groups']]} parameters and"
            f" the optimizer of {list(map(len, here))}, or their names differ: create the same"
            " groups, or pass load_optimizer_states=False."
        )
        raise OptionError(message)
    named = _parameters(module)
    room: Tensors = {}
    for key, saved in FileSystemReader(folder).read_metadata().state_dict_metadata.items():
        name = key.removeprefix(_OPTIMIZER).rpartition(".")[0]
        if (
            key.startswith(_OPTIMIZER)
            and name in named
            and isinstance(saved, TensorStorageMetadata)
        ):
            dtype, parameter = saved.properties.dtype, named[name]
            if saved.size == parameter.shape:
                own = torch.empty(shard_of(parameter).shape, dtype=dtype, device="cpu")
                room[key] = host_dtensor(own, parameter)
            else:  # of a class that is not elementwise (Adafactor's rows), which has all of them
                room[key] = torch.empty(saved.size, dtype=dtype, device="cpu")
    _read(folder, room)
    states: StatesByName = {
        name: {"step": torch.tensor(step)} for name, step in kept["steps"].items()
    }
    for name, numbers in kept.get("numbers", {}).items():  # which older ones lack
        states.setdefault(name, {}).update(numbers)
    for key, values in room.items():
        name, _, state = key.removeprefix(_OPTIMIZER).rpartition(".")
        states.setdefault(name, {})[state] = to_local(values)
    set_states(module, optimizer, states)
    for group, saved in zip(optimizer.param_groups, kept["groups"], strict=True):
        group.update({k: v for k, v in saved.items() if k not in {"params", "param_names"}})


def _take_numbers(
    states: StatesByName, named: Mapping[str, torch.Tensor]
) -> tuple[dict[str, float], StatesByName]:
    """Take what is the same on every rank out of ``states``: counts of steps, and the rest."""
    steps: dict[str, float] = {}
    numbers: StatesByName = {}
    for name, entry in states.items():
        for state, value in list(entry.items()):
            is_tensor = isinstance(value, torch.Tensor)
            if state == "step" and is_tensor and value.dtype == torch.float32:
                steps[name] = float(entry.pop(state))
                continue
            # Those of a scalar's own element are tensors as others'.
            is_element = is_tensor and not named[name].ndim and state != "step"
            if not is_tensor or (not value.ndim and not is_element):
                numbers.setdefault(name, {})[state] = entry.pop(state)
    return steps, numbers


@dataclass(frozen=True, slots=True)
class SavedWeight:
    """A weight or buffer of a checkpoint, not read: its keys there, shape and dtype."""

    key: str
    master: str | None
    """The key of its master weight; None: there is none."""
    shape: torch.Size
    dtype: torch.dtype


def saved_weights(folder: Path) -> dict[str, SavedWeight]:
    """Return the weights and buffers of a checkpoint by the model's names."""
    there: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, SavedWeight] = {}
    for key in [k for k in there if k.startswith(_MODULE)]:
        name = key.removeprefix(_MODULE)
        master = f"{_OPTIMIZER}{name}.master"
        entry = there[key]
        found[name] = SavedWeight(
            key, master if master in there else None, entry.size, entry.properties.dtype
        )
    return found


def read_whole(folder: Path, weights: Mapping[str, SavedWeight]) -> Tensors:
    """Return whole weights and buffers; this rank reads them by itself.

    A weight that has a master weight is that, but for elements that were written to since.
    """
    room: Tensors = {}
    for saved in weights.values():
        room[saved.key] = torch.empty(saved.shape, dtype=saved.dtype)
        if saved.master is not None:
            room[saved.master] = torch.empty(saved.shape)
    if room:
        with _quietly():
            dcp_load(room, checkpoint_id=folder, no_dist=True)
    whole: Tensors = {}
    for name, saved in weights.items():
        values = room.pop(saved.key)
        if saved.master is not None:
            master = room.pop(saved.master)
            values = torch.where(master.to(values.dtype) == values, master, values.float())
        whole[name] = values
    return whole


def read_states(folder: Path, name: str) -> Tensors:
    """Return the whole states of a parameter that are tensors; this rank reads them by itself."""
    there = FileSystemReader(folder).read_metadata().state_dict_metadata
    prefix = f"{_OPTIMIZER}{name}."
    room: Tensors = {}
    for key, saved in there.items():
        state = key.removeprefix(prefix)
        if key != state and "." not in state and isinstance(saved, TensorStorageMetadata):
            room[key] = torch.empty(saved.size, dtype=saved.properties.dtype)
    if room:
        with _quietly():
            dcp_load(room, checkpoint_id=folder, no_dist=True)
    return {key.removeprefix(prefix): values for key, values in room.items()}


def full_weights(module: nn.Module, *, frozen: bool) -> Tensors:
    """Return the full parameters and buffers, in host memory of rank 0; collective.

    ``frozen``: also those of frozen parameters.
    """
    left_out = {} if frozen else {n for n, p in module.named_parameters() if not p.requires_grad}
    first = not dist.is_initialized() or dist.get_rank() == 0
    whole: Tensors = {}
    for name, values in module.state_dict().items():
        if name not in left_out:
            gathered = values.full_tensor() if isinstance(values, DTensor) else values
            if first:
                whole[name] = gathered.detach().cpu()
    return whole


def _values_of(module: nn.Module) -> Tensors:
    """Return this rank's shards of parameters and buffers, by their names in a checkpoint."""
    named = _parameters(module)
    tensors: Tensors = {}
    for name, values in module.state_dict().items():
        if name in named:
            if is_sharded(values):
                own = values.to_local().detach().clone().cpu()
                tensors[_MODULE + name] = host_dtensor(own, named[name])
            else:
                tensors[_MODULE + name] = values.detach().clone().cpu()
        elif name not in dict(module.named_parameters(remove_duplicate=False)):
            tensors[_MODULE + name] = values
    return tensors


def _room_for(module: nn.Module) -> Tensors:
    """Return empty tensors to load a checkpoint of ``module`` into."""
    return {
        name.removeprefix(_MODULE): torch.empty_like(values)
        for name, values in _values_of(module).items()
    }


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(resharded(module).named_parameters())


def _names_in(folder: Path) -> list[str]:
    return list(FileSystemReader(folder).read_metadata().state_dict_metadata)


def _read(folder: Path, room: Tensors) -> None:
    if room:
        with _quietly():
            dcp_load(room, checkpoint_id=folder, process_group=host_group())


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*uninitialized, assuming the intent.*")
        yield


def _replace(file: Path, text: str) -> None:
    beside = file.with_name(f".{file.name}.new")
    with beside.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)
