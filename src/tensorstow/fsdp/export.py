"""Exports a stowed model to safetensors files that other libraries load, a tensor at a time.

Every rank takes part, as tensors are all-gathered; the first rank writes, or each its own files.
``stow(weights=...)`` and transformers' ``from_pretrained`` read the files: tied parameters are
stored once, under their first name, and several files have an index. The configuration of a
transformers model is written beside them.
"""

import copy
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.content import module_tensors
from tensorstow.checkpoint.pretrained import is_of_transformers
from tensorstow.fsdp.sharding import host_group, on_every_rank
from tensorstow.io.mapped import rename_over, replacing, sync_directory
from tensorstow.io.safetensors import Entry, Table, lay_out

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_METADATA = {"format": "pt"}
"""What readers of model files look for."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    table: Table


def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 << 30,
    by_rank: bool = False,
) -> None:
    """Write the full weights and persistent buffers of a model as safetensors that others load.

    Call it on every rank. It returns when all files are durable. One that fails as it writes leaves
    older files as they are, and one that is cut off behind that a directory that does not load:
    files of two models are never read as one. The directory needs room for both. For a model of
    transformers, config.json and generation_config.json are written too, so that
    ``from_pretrained`` can load the directory. At most two full tensors are in memory at a time.

    Args:
        model: A stowed model, or any other.
        path: The directory. Older files are replaced when all new ones are complete.
        max_shard_bytes: The largest size of a file in bytes; a larger tensor gets a file of its
            own. Default: 5 GiB.
        by_rank: Whether each rank writes its own files, to a directory that all ranks share.
            Default: False, rank 0 writes.

    Raises:
        OptionError: ``max_shard_bytes`` is no positive number.
        StowError: Another rank failed to write. That one raises what it met.
    """
    if isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
        message = f"max_shard_bytes={max_shard_bytes!r} was given: it is a number of bytes above 0."
        raise OptionError(message)
    _run_state_dict_pre_hooks(model)
    group = host_group()
    writers = dist.get_world_size(group) if by_rank and group is not None else 1
    contents = dict(module_tensors(model))
    share = -(-sum(t.numel() * t.element_size() for t in contents.values()) // writers)
    shards = _shards(contents, min(max_shard_bytes, max(share, 1)) if by_rank else max_shard_bytes)
    rank = 0 if group is None else dist.get_rank(group)
    folder = Path(path)
    what = f"write the model to {folder}"
    on_every_rank(partial(_make, folder, is_writer=rank < writers), what)
    try:
        for at in range(0, len(shards), writers):
            turn = shards[at : at + writers]
            places = [_beside(folder / shard.name) for shard in turn]
            on_every_rank(partial(_write, turn, places, rank), what)
    except BaseException:
        for shard in shards if rank == 0 else ():
            _beside(folder / shard.name).unlink(missing_ok=True)
        raise
    on_every_rank(partial(_finish, model, folder, shards if rank == 0 else ()), what)


def save_safetensors_file(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model like ``save_safetensors``, to one file of any name and without a configuration.

    Call it on every rank; rank 0 writes. It returns when the file is durable.

    Args:
        model: A stowed model, or any other.
        path: The file. An older one is replaced when the new one is complete.

    Raises:
        StowError: Rank 0 failed to write, which raises what it met.
    """
    _run_state_dict_pre_hooks(model)
    group = host_group()
    rank = 0 if group is None else dist.get_rank(group)
    file = Path(path)
    what = f"write the model to {file}"
    on_every_rank(partial(_make, file.parent, is_writer=rank == 0), what)
    whole = _shard_of(file.name, dict(module_tensors(model)))
    on_every_rank(partial(_write, [whole], [file], rank), what)


def _beside(path: Path) -> Path:
    """Return where a file is until all of its directory are complete."""
    return path.with_name(f".{path.name}.new")


def _make(folder: Path, *, is_writer: bool) -> None:
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)


def _run_state_dict_pre_hooks(model: nn.Module) -> None:
    """Run the hooks of ``state_dict()`` that precede a read: wait for updates, reshard."""
    for module in model.modules():
        for hook in module._state_dict_pre_hooks.values():  # noqa: SLF001
            hook(module, "", False)  # noqa: FBT003  # torch's own call


def _shards(contents: Mapping[str, torch.Tensor], most: int) -> list[_Shard]:
    """Return the files, in the order of the model."""
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = most
    for name, tensor in contents.items():
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > room and parts[-1]:
            parts.append({})
            room = most
        parts[-1][name] = tensor
        room -= nbytes
    count = len(parts)
    shards = []
    for number, part in enumerate(parts, 1):
        name = _ONE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        shards.append(_shard_of(name, part))
    return shards


def _shard_of(name: str, part: Mapping[str, torch.Tensor]) -> _Shard:
    entries = {n: Entry(t.dtype, tuple(t.shape)) for n, t in part.items()}
    return _Shard(name, part, lay_out(entries, _METADATA))


@torch.no_grad()
def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return full.cpu()


def _write(shards: Sequence[_Shard], places: Sequence[Path], rank: int) -> None:
    """Write files in parallel, each by one rank to its place.

    What fails here is raised behind the last gather, for the other ranks wait for all of them.
    """
    own = shards[rank] if rank < len(shards) else None
    turns = deque(_in_turns(shards))
    try:
        with ExitStack() as opened:
            file = None
            if own is not None:
                file = opened.enter_context(replacing(places[rank], own.table.nbytes))
                file.write(torch.frombuffer(bytearray(own.table.header), dtype=torch.uint8), 0)
            while turns:
                shard, name = turns.popleft()
                tensor = _whole(shard.tensors[name])
                if file is not None and shard is own:
                    file.write(tensor, own.table.entries[name].offset)
    except Exception:
        for shard, name in turns:
            _whole(shard.tensors[name])
        raise


def _in_turns(shards: Sequence[_Shard]) -> Iterator[tuple[_Shard, str]]:
    """Yield a tensor of each file, then the next of each: so that all writers are busy."""
    for names in zip_longest(*(shard.tensors for shard in shards)):
        yield from ((s, n) for s, n in zip(shards, names, strict=True) if n is not None)


def _finish(model: nn.Module, folder: Path, shards: Sequence[_Shard]) -> None:
    """Put complete files in the place of older ones, with an index where they are several.

    And the configuration, where the model has one. ``shards``: all; empty: another rank does it.
    One file replaces another at once. Before several all older ones go, the index first.
    """
    if not shards:
        return
    index, one = folder / _INDEX, folder / _ONE
    index.unlink(missing_ok=True)
    for old in ([one] if len(shards) > 1 else []) + sorted(folder.glob(_SHARDS)):
        old.unlink(missing_ok=True)
    sync_directory(folder)
    for shard in shards:
        rename_over(_beside(folder / shard.name), folder / shard.name)
    sync_directory(folder)
    if len(shards) > 1:
        where = {name: shard.name for shard in shards for name in shard.tensors}
        total = sum(e.nbytes for shard in shards for e in shard.table.entries.values())
        told = {"metadata": {"total_size": total}, "weight_map": where}
        text = json.dumps(told, indent=2).encode()
        with replacing(index, len(text)) as file:
            file.write(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
    for left in folder.glob(_beside(folder / _SHARDS).name):  # by one that was cut off
        left.unlink(missing_ok=True)
    write_configuration(model, folder)


def write_configuration(model: nn.Module, folder: Path) -> None:
    """Write the configuration files of transformers' ``save_pretrained``.

    Args:
        model: A model; one that is not of transformers has no configuration.
        folder: The directory.
    """
    if not is_of_transformers(model):
        return
    given: Any = model
    config = copy.deepcopy(given.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(given.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if given.can_generate() and given.generation_config is not None:
        given.generation_config.save_pretrained(folder)
