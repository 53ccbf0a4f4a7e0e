"""Optimizer states to a safetensors file and back, a piece at a time.

A tensor is called ``<parameter>.<state>``. A parameter is called by its name if all have one, else
by its place in the groups, as in ``state_dict``. Hyper-parameters are JSON in the file's metadata.
"""

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.directories import expand_path
from tensorstow.base.errors import OptionError
from tensorstow.base.keywords import names_keywords
from tensorstow.base.sizes import format_count
from tensorstow.checkpoint.content import own_names, refuse_other_groups
from tensorstow.checkpoint.full_state import lacks_states, without_placeholders
from tensorstow.checkpoint.serialize import flatten, inflate
from tensorstow.io.digest_list import DigestList, verify
from tensorstow.io.mapped import Mapped, new_safetensors
from tensorstow.io.safetensors import METADATA, Entry, Table, lay_out, read_table
from tensorstow.step.managed_param import in_shape_of
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups, States, as_step
from tensorstow.tensors.dtensor import groups_of

_VERSION = "1"
_OURS = "tensorstow"
_HYPER = "param_groups"
_KEYED_BY = "keyed_by"
_NOT_HYPER = frozenset({"params", "param_names"})
_FEW = 5
"""Names that a message lists."""


@dataclass(slots=True)
class _Contents:
    """The content of a file."""

    entries: dict[str, Entry] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The tensors that are in memory."""
    elsewhere: dict[int, str] = field(default_factory=dict)
    """Names of the parameters whose states are still to be gathered, by number."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a tensor that is in memory."""
        self.tensors[name] = tensor
        self.entries[name] = Entry(tensor.dtype, tuple(tensor.shape))


def save(
    path: Path,
    params: ParamTable,
    groups: Groups,
    states: States,
    module: torch.nn.Module | None,
) -> None:
    """Write all states and hyper-parameters to ``path``, durably; a crash leaves the old file.

    Memory stays bounded: states on disk go from one file to the other in pieces. Raises
    DirectoryError if there is no room, OptionError for a state that is no tensor, or if
    parameters are sharded over several ranks.
    """
    _refuse_shards(groups)
    contents = _Contents()
    plain: list[dict[str, Any]] = []
    named, names = _names(groups, module)
    for group, called in zip(groups, names, strict=True):
        for parameter, name in zip(group["params"], called, strict=True):
            _add_states(contents, name, states.get(parameter) or {}, params, parameter)
        plain.append({k: v for k, v in group.items() if k not in _NOT_HYPER})
    hyper, numbers = flatten(plain, "a parameter group")
    for index, number in enumerate(numbers):
        contents.add(f"{_HYPER}.{index}", number)
    for group, called in zip(hyper, names, strict=True):
        group["params"] = called
    metadata = {
        **METADATA,
        _OURS: _VERSION,
        _KEYED_BY: "name" if named else "place",
        _HYPER: json.dumps(hyper),
    }
    _write(path, lay_out(contents.entries, metadata), contents, params)


def _refuse_shards(groups: Groups) -> None:
    if any(groups_of(p) for group in groups for p in group["params"]):
        message = (
            "save_safetensors() was called with parameters that are sharded over several ranks: it"
            " writes one file, and no rank has it all. Save by torch.distributed.checkpoint"
            " (get_optimizer_state_dict, dcp.save), which any number of ranks loads; or gather the"
            " states by get_optimizer_state_dict with full_state_dict=True."
        )
        raise OptionError(message)


@names_keywords
def state_dict_of(
    path: str | os.PathLike[str], groups: Groups, module: torch.nn.Module | None = None
) -> dict[str, Any]:
    """Read a file of ``save_safetensors`` as a ``state_dict``, which torch's optimizers load too.

    Args:
        path: The file.
        groups: ``param_groups`` of the optimizer that is to load it.
        module: Has the parameters' names. Default: None, those that ``groups`` have, if any.
            Without names in both, parameters are matched by their places.

    Returns:
        "state" and "param_groups", for ``load_state_dict``. The tensors are the file's mapped
        memory. A file with a list of digests is read once to verify it; of another one nothing is
        read before it is used: moments that are NaN or negative are taken as they are.

    Raises:
        DamageError: The file is not what was written.
        OptionError: It is another kind of file, or other parameters.
    """
    path = expand_path(path)
    verify(path)
    table = read_table(path)
    if table.metadata.get(_OURS) != _VERSION:
        message = (
            f"{path} was to be read as optimizer states: its metadata says"
            f" {table.metadata.get(_OURS)!r} for {_OURS!r} and {_VERSION!r} is needed. It is"
            " another kind of file, or a newer version's."
        )
        raise OptionError(message)
    mapped = Mapped.read(path)
    tensors = {n: mapped.tensor(e.offset, e.shape, e.dtype) for n, e in table.entries.items()}
    saved = _saved_groups(path, table, tensors)
    by_owner = _by_owner(tensors)
    state: dict[int, dict[str, torch.Tensor]] = {}
    named, names = _names(groups, module)
    by_name = named and table.metadata[_KEYED_BY] == "name"
    places = _match(path, [g.pop("params") for g in saved], names, by_name=by_name)
    parameters = [p for group in groups for p in group["params"]]
    for index, (name, parameter) in enumerate(zip(places, parameters, strict=True)):
        if name in by_owner:
            _check_shapes(path, name, by_owner[name], parameter)
            state[index] = {**by_owner[name], "step": by_owner[name]["step"].clone()}
    numbers = iter(range(len(parameters)))
    for group, target in zip(saved, groups, strict=True):
        group["params"] = [next(numbers) for _ in target["params"]]
    return {"state": state, "param_groups": saved}


def _saved_groups(
    path: Path, table: Table, tensors: dict[str, torch.Tensor]
) -> list[dict[str, Any]]:
    """Return the groups of a file; numbers that are tensors are taken out of ``tensors``."""
    try:
        plain = json.loads(table.metadata[_HYPER])
        saved: list[dict[str, Any]] = inflate(plain, lambda i: tensors.pop(f"{_HYPER}.{i}").clone())
        return [{**group, "params": [*map(_name, group["params"])]} for group in saved]
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        message = (
            f"The parameter groups in {path} cannot be read ({error!r}): something else wrote its"
            " metadata. Take the original."
        )
        raise OptionError(message) from error


def _name(name: object) -> str:
    if not isinstance(name, str):
        message = f"params has {name!r}, which is no text"
        raise TypeError(message)
    return name


def _names(groups: Groups, module: torch.nn.Module | None) -> tuple[bool, list[list[str]]]:
    """Return the names of parameters by group, or their numbers, and whether they are names."""
    names = own_names(groups, module)
    if names is not None:
        return True, names
    places = map(str, itertools.count())
    return False, [[next(places) for _ in group["params"]] for group in groups]


def _add_states(
    contents: _Contents,
    name: str,
    entry: Mapping[str, Any],
    params: ParamTable,
    parameter: torch.Tensor,
) -> None:
    param = params.find(parameter)
    for key, value in without_placeholders(entry).items():
        if key == "step":
            contents.add(f"{name}.{key}", as_step(value))
        elif isinstance(value, torch.Tensor):
            contents.add(f"{name}.{key}", value.detach())
        else:
            message = (
                f"The state {key!r} of {name} is a {type(value).__name__}: safetensors holds"
                " tensors only. Save the state_dict by torch.save."
            )
            raise OptionError(message)
    if param is None or not lacks_states(entry, param):
        return
    if param.order is not None:  # its pieces are not those of its shape, one after the other
        whole = in_shape_of(param.shard, params.store.read([param.number])[param.number])
        for key, state in whole.items():
            if f"{name}.{key}" not in contents.entries:
                contents.add(f"{name}.{key}", state.contiguous())
        return
    contents.elsewhere[param.number] = name
    for key in param.family.states:
        shape = tuple(parameter.shape)
        # A state that the user has set is in memory, and has its entry already.
        contents.entries.setdefault(f"{name}.{key}", Entry(torch.float32, shape))


def _write(path: Path, table: Table, contents: _Contents, params: ParamTable) -> None:
    elsewhere = contents.elsewhere
    listed = DigestList(path)
    with (
        new_safetensors(path, table, listed) as file,
        # The generator holds the pipeline's lock until it is closed.
        closing(params.store.pieces(elsewhere)) as pieces,
    ):
        for name, tensor in contents.tensors.items():
            file.put(name, tensor.cpu())
        for piece in pieces:
            for key, values in piece.states.items():
                name = f"{elsewhere[piece.parameter]}.{key}"
                if name not in contents.tensors:
                    file.put(name, values, piece.start)
    listed.write()


def _by_owner(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    owners: dict[str, dict[str, torch.Tensor]] = {}
    for full, tensor in tensors.items():
        # A parameter's name may have dots, and a state's has none.
        owner, _, state = full.rpartition(".")
        owners.setdefault(owner, {})[state] = tensor
    return owners


def _match(
    path: Path, saved: Sequence[Sequence[str]], names: Sequence[Sequence[str]], *, by_name: bool
) -> list[str]:
    """Return the file's name of each parameter of this optimizer, in order."""
    refuse_other_groups(str(path), len(saved), len(names))
    for number, (saved_names, current) in enumerate(zip(saved, names, strict=True)):
        if by_name and set(saved_names) != set(current):
            raise OptionError(_difference(path, number, saved_names, current))
        if len(saved_names) != len(current):
            count = format_count(len(saved_names), "parameter")
            message = (
                f"{path} has {count} in group {number} and this optimizer"
                f" {len(current)}: they are of different models, or grouped otherwise."
            )
            raise OptionError(message)
    return [name for group in (names if by_name else saved) for name in group]


def _difference(path: Path, number: int, theirs: Sequence[str], ours: Sequence[str]) -> str:
    def some(names: Iterator[str]) -> str:
        listed = list(names)
        more = f" and {len(listed) - _FEW} more" if len(listed) > _FEW else ""
        return ", ".join(listed[:_FEW]) + more if listed else "nothing"

    return (
        f"Group {number} of {path} and of this optimizer are not of the same parameters: only the"
        f" file has {some(n for n in theirs if n not in set(ours))}; only the optimizer has"
        f" {some(n for n in ours if n not in set(theirs))}. Give it the same model in the same"
        " groups."
    )


def _check_shapes(
    path: Path, name: str, entry: Mapping[str, torch.Tensor], parameter: torch.Tensor
) -> None:
    if "step" not in entry:
        message = f"{path} has no step count for {name}: something else wrote it."
        raise OptionError(message)
    for key, tensor in entry.items():
        if key != "step" and tensor.shape != parameter.shape:
            message = (
                f"{name}.{key} in {path} is {tuple(tensor.shape)}, and the parameter here is"
                f" {tuple(parameter.shape)}: they are of different models."
            )
            raise OptionError(message)
