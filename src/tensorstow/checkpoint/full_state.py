"""Gathers whole states from chunks: into RAM if they are small, else into a mapped file."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.directories import inspect_directory
from tensorstow.base.errors import DirectoryError
from tensorstow.base.sizes import format_bytes, round_up
from tensorstow.io.arena import TENSOR_ALIGN
from tensorstow.io.mapped import scratch_pieces
from tensorstow.states.state_store import StateStore
from tensorstow.step.managed_param import ManagedParam, in_shape_of
from tensorstow.step.param_table import ParamTable
from tensorstow.tensors.dtensor import is_sharded, layout_of, sharded_like
from tensorstow.tensors.placeholder import StateOnDisk

RAM_BYTES = 64 << 20
"""States up to this size are gathered in RAM: a file would be slower and save nothing."""
_WIDTH = torch.float32.itemsize


def read_full_states(
    store: StateStore, numbers: Sequence[int]
) -> dict[int, dict[str, torch.Tensor]]:
    """Return the states of the parameters with these ``numbers``, 1-D and fp32, by name.

    States on disk of more than RAM_BYTES are returned in a mapped, unnamed file next to them (ADR
    0014): the system may reclaim its pages, and the file is freed with the last of the tensors.
    Raises DirectoryError if no directory has space for it.
    """
    names = [(n, name) for n in numbers for name in store.families[n].states]
    nbytes = sum(_WIDTH * store.sizes[n] for n, _ in names)
    if nbytes <= RAM_BYTES or not store.storage.directories:
        return store.read(numbers)
    places: dict[tuple[int, str], int] = {}
    end = 0
    for key in names:
        places[key] = end
        end = round_up(end + _WIDTH * store.sizes[key[0]], TENSOR_ALIGN)
    directory = _roomiest(store.storage.directories, end)
    # The generator holds the pipeline's lock until it is closed.
    with scratch_pieces(directory, end) as file, closing(store.pieces(numbers)) as pieces:
        for piece in pieces:
            for name, values in piece.states.items():
                file.write(values, places[piece.parameter, name] + _WIDTH * piece.start)
        mapped = file.map()
    out: dict[int, dict[str, torch.Tensor]] = {n: {} for n in numbers}
    for (number, name), place in places.items():
        out[number][name] = mapped.tensor(place, (store.sizes[number],), torch.float32)
    return out


def complete_state_dict(
    entries: dict[Any, Any], parameters: Sequence[torch.Tensor], params: ParamTable
) -> None:
    """Add states on disk to torch's state dict."""
    params.store.pipeline.wait_idle()
    # By parameter: entries under the user's own keys stay as they are, as in torch.
    params_by_index = {
        i: param
        for i, parameter in enumerate(parameters)
        if isinstance(entries.get(i), dict) and (param := params.find(parameter)) is not None
    }
    missing = {
        param.number: (i, param.shard)
        for i, param in params_by_index.items()
        if lacks_states(entries[i], param)
    }
    for number, tensors in read_full_states(params.store, list(missing)).items():
        index, parameter = missing[number]
        entry = entries[index]
        shaped = in_shape_of(parameter, tensors)
        # The moments are copies, so the step count is copied too: all are of one step. Entries
        # that the user has set for the next step stay.
        entries[index] = {**entry, **shaped, **without_placeholders(entry)}
        entries[index]["step"] = entry["step"].clone()
    for i, param in params_by_index.items():
        if layout_of(param.owner) is not None:
            entries[i] = _as_sharded(entries[i], param)


def lacks_states(entry: Mapping[str, Any], param: ManagedParam) -> bool:
    """Return whether ``entry`` of ``optimizer.state`` lacks states."""
    # Without a step count it was made by a mere read of a state that does not exist yet.
    return "step" in entry and not without_placeholders(entry).keys() >= set(param.family.states)


def without_placeholders(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of ``optimizer.state`` without its placeholders."""
    return {name: value for name, value in entry.items() if not isinstance(value, StateOnDisk)}


def _as_sharded(entry: Mapping[str, Any], param: ManagedParam) -> dict[str, Any]:
    """Return an entry whose states are DTensors, as torch's optimizers have them."""
    shards = {k: v for k, v in without_placeholders(entry).items() if k in param.family.states}
    whole = {k: v if is_sharded(v) else sharded_like(param.owner, v) for k, v in shards.items()}
    return {**entry, **whole}


def _roomiest(directories: Sequence[Path], nbytes: int) -> Path:
    facts = max(map(inspect_directory, directories), key=lambda directory: directory.free_bytes)
    if facts.free_bytes < nbytes:
        free, needed = format_bytes(facts.free_bytes), format_bytes(nbytes)
        message = (
            f"All states were requested in one piece: that is a scratch file of {needed} next to"
            f" them, and {facts.path} has {free} free. Free some space there, or keep a"
            " snapshot (optimizer.snapshot), which copies nothing."
        )
        raise DirectoryError(message)
    return facts.path
