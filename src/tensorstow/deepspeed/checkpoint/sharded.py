"""Checkpoints of an engine: sharded tensors by name, which any number of ranks can load.

[Note: Checkpoints] A folder per tag holds what ``torch.distributed.checkpoint`` writes (every rank
its own elements, no rank the whole) and ``engine.pt``, the little that is the same on every rank.
Names are the model's: ``module.<name>`` and ``optimizer.<name>.<state>``. The file ``latest`` is
replaced when all of that is written, so it never names half a checkpoint. ``engine.pt.digests`` has
the files' digests, which are verified before anything is loaded.
"""

import os
import socket
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from tensorstow.base.directories import path_inside
from tensorstow.base.errors import OptionError, StoreFormatError, StowError
from tensorstow.base.new_file import NewFile
from tensorstow.base.regular_file import check_regular, is_there, read_text
from tensorstow.checkpoint.serialize import inflate
from tensorstow.checkpoint.torch_file import load_torch_file
from tensorstow.deepspeed.checkpoint.restricted_reader import RestrictedReader, load_tensors
from tensorstow.deepspeed.checkpoint.saved_values import (
    check_options,
    check_states,
    checking,
    counts_in,
    options_in,
    refuse_other_amsgrad,
)
from tensorstow.deepspeed.states import StatesByName, group_names, set_states, states_of
from tensorstow.doorkit.checkpoint_checks import reading, refuse_other_names, refuse_other_shape
from tensorstow.fsdp.full_tensors import host_dtensor, resharded
from tensorstow.fsdp.sharding import (
    from_every_rank,
    gather_digests,
    host_group,
    on_every_rank,
    rank_here,
    verify_together,
)
from tensorstow.fsdp.units import aliases_of
from tensorstow.io.digest_list import DigestList, verify
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.step.validation import check_step
from tensorstow.tensors.dtensor import is_sharded, shard_of, to_local

COUNTS = ("global_steps", "micro_steps", "skipped_steps", "global_samples")
"""The counters of an engine that a checkpoint has."""
LATEST = "latest"
LATEST_UNIVERSAL = "latest_universal"
STRICT = "load_module_strict"
"""The keyword of ``load_checkpoint`` that lets names differ."""
_KEPT = "engine.pt"
_MODULE, _OPTIMIZER = "module.", "optimizer."
Tensors = dict[str, torch.Tensor]


def save(
    folder: Path,
    module: nn.Module,
    optimizer: PlacedOptimizer | None,
    common: Mapping[str, Any],
    *,
    has_frozen: bool,
    latest: bool,
) -> None:
    """Write a checkpoint to ``folder``; collective.

    ``common`` has the values that are the same on every rank. During the call a rank holds a copy
    of its weights; states on disk are read through a mapped file.
    """
    tensors, named = _values_of(module), _parameters(module)
    frozen = [name for name, p in named.items() if not p.requires_grad]
    if not has_frozen:
        for name in frozen:
            tensors.pop(_MODULE + name, None)  # a state_dict of the model's own may lack it
    states = {} if optimizer is None else states_of(module, optimizer)
    steps, numbers = _take_numbers(states, named)
    for name, entry in states.items():
        for state, values in entry.items():
            # States that are not elementwise (Adafactor's rows) are whole on every rank.
            cut = to_local(values).shape == shard_of(named[name]).shape
            whole = host_dtensor(values, named[name]) if cut else values
            tensors[f"{_OPTIMIZER}{name}.{state}"] = whole
    groups: list[dict[str, Any]] = []
    if optimizer is not None:
        named_groups = zip(optimizer.param_groups, group_names(module, optimizer), strict=True)
        groups = [{**group, "params": names} for group, names in named_groups]
    summary = {
        "groups": groups,
        "steps": steps,
        "numbers": numbers,
        "frozen": frozen,
        "tied": aliases_of(module),
        "class": None if optimizer is None else optimizer._stowed_class,  # noqa: SLF001  # a hook of the engine
    }
    listed = DigestList(folder / _KEPT)
    writer = FileSystemWriter(folder)
    writer.fs = _ListedFileSystem(listed)
    with _quietly():
        dcp_save(tensors, storage_writer=writer, process_group=host_group())
    gather_digests(listed)

    def write() -> None:
        if rank_here() == 0:
            listed.write_main(partial(torch.save, {**common, **summary}))
            if latest:
                write_tag(folder.parent / LATEST, folder.name)

    on_every_rank(write, f"write to {folder}")


class _ListedFileSystem(FileSystem):
    """Writes each file of a checkpoint as a new one that replaces an older one."""

    def __init__(self, listed: DigestList) -> None:
        self._listed = listed

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Yield a stream that reads or writes a file, as torch calls it."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with NewFile(Path(path)) as file:
            with self._listed.stream(file) as new:
                yield new
            file.publish()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, as torch calls it for the metadata."""
        super().rename(path, new_path)
        self._listed.digests[Path(new_path).name] = self._listed.digests.pop(Path(path).name)


def validate_same_folder(directory: str | os.PathLike[str], tag: str | None, call: str) -> None:
    """Raise OptionError on every rank if one has another folder: each has a part of one.

    Hosts may have the directory in different places. ``tag``: None where there is no file
    ``latest``.
    """
    places = from_every_rank((tag, socket.gethostname(), os.path.realpath(directory)))
    tags = [entry[0] for entry in places]
    if len(set(tags)) > 1:
        noun, values = "tags", tags
    elif len({entry[1:] for entry in places}) > len({entry[1] for entry in places}):
        noun, values = "directories", [entry[2] for entry in places]
    else:
        return
    message = (
        f"{call} was called with the {noun} {values} on ranks 0 to {len(places) - 1}: each rank has"
        " a part of one checkpoint. Pass the same tag on every rank, and a directory that all of"
        " them share."
    )
    raise OptionError(message)


def latest_tag(directory: Path, name: str = LATEST) -> str | None:
    """Return the tag in ``latest``, or another file; None if nothing was saved.

    Raises StoreFormatError if it is not a name in the directory, DirectoryError if it is not a
    file.
    """
    file = directory / name
    verify(file)
    if not is_there(file):
        return None
    tag = read_text(file, errors="replace").strip()
    path_inside(directory, tag, file, links=True)
    return tag


def write_tag(file: Path, tag: str) -> None:
    """Write the file that names the newest checkpoint of its directory."""
    DigestList(file).write_main(lambda stream: stream.write(tag.encode()))


def read_common(folder: Path, check: Callable[[Path], None] = verify) -> dict[str, Any]:
    """Return what is the same on every rank, after ``check`` of all files of the checkpoint.

    Raises StoreFormatError if there is none, DamageError if a file is not what was written.
    """
    file = folder / _KEPT
    check(file)
    if not is_there(file):
        message = (
            f"{folder} has no {_KEPT}: it is not a checkpoint. Pass a directory that"
            " save_checkpoint() wrote to, this engine's or DeepSpeed's, and a tag in it."
        )
        raise StoreFormatError(message)
    with reading(file):
        common: dict[str, Any] = load_torch_file(file)
    return common


class ShardedCheckpoint:
    """A folder that this engine's ``save_checkpoint`` wrote."""

    def __init__(self, folder: Path) -> None:
        """Verify the files, and read what is the same on every rank; collective.

        Raises StoreFormatError if there is no checkpoint, DamageError if it is damaged.
        """
        self._folder = folder
        self._common = read_common(folder, verify_together)
        self.path = folder / _KEPT
        """The file of the values that are the same on every rank."""
        with checking(self.path):
            self.counts: dict[str, int] = counts_in(self._common, COUNTS)
            self.scale: dict[str, Any] | None = self._common["scale"]
            self.scheduler: Any = self._common["scheduler"]
            plain, tensors = self._common["client_state"]
            self.client_state: dict[str, Any] = inflate(plain, tensors.__getitem__)
            """The ``client_state`` of ``save_checkpoint``."""

    def check(self, module: nn.Module, optimizer: PlacedOptimizer | None, *, strict: bool) -> None:
        """Raise an error if the checkpoint cannot be loaded; nothing is changed.

        What is known of tensors without reading them is checked: names, shapes and the lengths of
        files. ``optimizer`` None: weights alone are to be loaded. Raises OptionError for another
        model, other groups or another class, and for other names if ``strict``; StoreFormatError
        for values that cannot have been saved.
        """
        folder = self._folder
        saved, expected = saved_weights(folder), _kept(module)
        if strict:
            refuse_other_names(folder, saved, expected, STRICT)
        for name in expected.keys() & saved.keys():
            refuse_other_shape(folder, name, saved[name].shape, expected[name].shape)
        if optimizer is not None:
            self._check_states(module, optimizer)

    def _check_states(self, module: nn.Module, optimizer: PlacedOptimizer) -> None:
        folder, common = self._folder, self._common
        theirs, ours = common.get("class"), optimizer._stowed_class  # older ones lack it  # noqa: SLF001  # a hook of the engine
        if theirs not in {None, ours}:
            message = (
                f"{folder} has the states of {theirs}, and the optimizer is {ours}: create the same"
                " one, or pass load_optimizer_states=False."
            )
            raise OptionError(message)
        with checking(self.path):
            saved_groups = [list(group["params"]) for group in common["groups"]]
            entries: dict[str, dict[str, Any]] = {
                name: {"step": step} for name, step in common["steps"].items()
            }
            for name, numbers in common.get("numbers", {}).items():
                entries.setdefault(name, {}).update(numbers)
        refuse_other_groups(folder, saved_groups, group_names(module, optimizer))
        settings = {
            id(p): bool(g.get("amsgrad")) for g in optimizer.param_groups for p in g["params"]
        }
        named = {name: p for name, p in _parameters(module).items() if id(p) in settings}
        for name, state, saved in _saved_states(folder):
            values = torch.empty(saved.size, dtype=saved.properties.dtype, device="meta")
            entries.setdefault(name, {})[state] = values
        with checking(self.path):
            check_options(optimizer, common["groups"])
        refuse_other_amsgrad(optimizer, common["groups"])
        with checking(self.path):
            for name, entry in entries.items():
                if name not in named:
                    message = f"{name!r} has states, and is no parameter of the optimizer."
                    raise OptionError(message)
                if isinstance(optimizer, StowedAdam):
                    check_states(named[name], entry, name, amsgrad=settings[id(named[name])])
                elif "step" in entry:
                    check_step(entry["step"], name)

    def load_module(self, module: nn.Module) -> None:
        """Load the weights and buffers that the checkpoint has, after ``check``."""
        saved = saved_weights(self._folder)
        room = {
            key: torch.empty_like(values)
            for key, values in _values_of(module).items()
            if key.removeprefix(_MODULE) in saved
        }
        _read(self._folder, room)
        targets: Mapping[str, torch.Tensor] = {
            **dict(module.named_buffers()),
            **_parameters(module),
        }
        with torch.no_grad():
            for key, values in room.items():
                to_local(targets[key.removeprefix(_MODULE)]).copy_(to_local(values))

    def load_states(self, module: nn.Module, optimizer: PlacedOptimizer) -> None:
        """Load states and hyper-parameters, after ``check``; collective."""
        folder, common = self._folder, self._common
        named = _parameters(module)
        room: dict[tuple[str, str], torch.Tensor] = {}
        for name, state, saved in _saved_states(folder):
            if name in named:
                dtype, parameter = saved.properties.dtype, named[name]
                if saved.size == parameter.shape:
                    share = torch.empty(shard_of(parameter).shape, dtype=dtype, device="cpu")
                    room[name, state] = host_dtensor(share, parameter)
                else:  # the class is not elementwise (Adafactor's rows): every rank has all of them
                    room[name, state] = torch.empty(saved.size, dtype=dtype, device="cpu")
        _read(folder, {f"{_OPTIMIZER}{name}.{state}": t for (name, state), t in room.items()})
        states: StatesByName = {
            name: {"step": torch.tensor(step)} for name, step in common["steps"].items()
        }
        for name, numbers in common.get("numbers", {}).items():  # which older ones lack
            states.setdefault(name, {}).update(numbers)
        for (name, state), values in room.items():
            states.setdefault(name, {})[state] = to_local(values)
        set_states(module, optimizer, states)
        for group, saved in zip(optimizer.param_groups, common["groups"], strict=True):
            group.update(options_in(saved))


def refuse_other_groups(
    folder: Path, saved: Sequence[Collection[str]], own: Sequence[Collection[str]]
) -> None:
    """Raise OptionError if a checkpoint's groups have other parameters than the optimizer's."""
    if saved != own:
        message = (
            f"{folder} has groups of {[*map(len, saved)]} parameters and the optimizer of"
            f" {[*map(len, own)]}, or their names differ: create the same groups, or pass"
            " load_optimizer_states=False."
        )
        raise OptionError(message)


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
    entries = _metadata(folder)
    weights: dict[str, SavedWeight] = {}
    for key in [k for k in entries if k.startswith(_MODULE)]:
        name = key.removeprefix(_MODULE)
        master = f"{_OPTIMIZER}{name}.master"
        entry = entries[key]
        weights[name] = SavedWeight(
            key, master if master in entries else None, entry.size, entry.properties.dtype
        )
    return weights


def read_whole(folder: Path, weights: Mapping[str, SavedWeight]) -> Tensors:
    """Return whole weights and buffers; this rank reads them by itself.

    A weight that has a master weight is that, but for elements that were written to since.
    """
    room: Tensors = {}
    for saved in weights.values():
        room[saved.key] = torch.empty(saved.shape, dtype=saved.dtype)
        if saved.master is not None:
            room[saved.master] = torch.empty(saved.shape)
    _read(folder, room, alone=True)
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
    room = {
        state: torch.empty(saved.size, dtype=saved.properties.dtype)
        for owner, state, saved in _saved_states(folder)
        if owner == name
    }
    _read(folder, {f"{_OPTIMIZER}{name}.{state}": t for state, t in room.items()}, alone=True)
    return room


def _saved_states(folder: Path) -> Iterator[tuple[str, str, TensorStorageMetadata]]:
    """Yield the states that are tensors, not read: the parameter, the state and its sizes."""
    for key, saved in _metadata(folder).items():
        if key.startswith(_OPTIMIZER) and isinstance(saved, TensorStorageMetadata):
            name, _, state = key.removeprefix(_OPTIMIZER).rpartition(".")
            yield name, state, saved


def _values_of(module: nn.Module) -> Tensors:
    """Return this rank's shards of parameters and buffers, by their names in a checkpoint."""
    named = _parameters(module)
    tensors: Tensors = {}
    for name, values in _kept(module).items():
        key = _MODULE + name
        if name not in named:
            tensors[key] = values
            continue
        share = to_local(values).detach().clone().cpu()
        tensors[key] = host_dtensor(share, named[name]) if is_sharded(values) else share
    return tensors


def _kept(module: nn.Module) -> Tensors:
    """Return the parameters and buffers that a checkpoint has: a shared parameter once."""
    all_names = dict(module.named_parameters(remove_duplicate=False))
    aliases = all_names.keys() - _parameters(module).keys()
    return {name: values for name, values in module.state_dict().items() if name not in aliases}


def _parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return dict(resharded(module).named_parameters())


def _metadata(folder: Path) -> dict[str, Any]:
    """Return what is known of each tensor; raise StoreFormatError if a file lacks a part of one."""
    file, ends = folder / ".metadata", dict[Path, int]()
    with _reading(file):
        read = RestrictedReader(folder).read_metadata()
        for info in read.storage_data.values():
            part = path_inside(folder, info.relative_path, file)
            ends[part] = max(info.offset + info.length, ends.get(part, 0))
    for part, end in ends.items():
        nbytes = check_regular(part).st_size if is_there(part) else 0
        if nbytes != end:
            message = (
                f"{part} is gone, was cut short or is another file: it has {nbytes} bytes, and by"
                f" {file} {end} were written. Load another checkpoint."
            )
            raise StoreFormatError(message)
    return read.state_dict_metadata


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise StoreFormatError if what torch reads of a checkpoint in the block cannot be read."""
    try:
        with _quietly():
            yield
    except (StowError, MemoryError):
        raise
    except (Exception, CheckpointException) as error:  # damaged bytes raise errors of any kind
        # Torch collects what the ranks raised in an error that is no Exception.
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        for failure, _ in failures:
            if isinstance(failure, StowError) or not isinstance(failure, Exception):
                raise failure from error
        message = f"{path} cannot be read: it is damaged or cut short. Load another checkpoint."
        raise StoreFormatError(message) from error


def _read(folder: Path, room: Tensors, *, alone: bool = False) -> None:
    """Read the tensors in ``room``; collective, unless this rank reads them ``alone``."""
    if room:
        with _reading(folder):
            load_tensors(folder, room, group=host_group(), alone=alone)


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress torch's warning that there is only one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*uninitialized, assuming the intent.*")
        yield
