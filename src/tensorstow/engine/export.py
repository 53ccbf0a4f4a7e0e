"""A stowed model as safetensors that others load: one set of files, a tensor at a time.

Every rank takes part, for tensors are gathered; the first one writes. What is written is what
``stow(weights=...)`` and transformers' ``from_pretrained`` read: tied parameters are there once,
by their first name, and an index says which file has what where there are several.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tensorstow.base.errors import OptionError, StowError
from tensorstow.engine.mesh import host_group
from tensorstow.io.mapped import PieceFile, replacing
from tensorstow.io.safetensors import Entry, Table, lay_out

_ONE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_METADATA = {"format": "pt"}
"""What readers of model files look for."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file."""

    name: str
    tensors: Mapping[str, torch.Tensor]
    table: Table


def save_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, max_shard_bytes: int = 5 << 30
) -> None:
    """Write the weights and persistent buffers of ``model`` into the directory ``path``.

    In files of at most ``max_shard_bytes`` (a larger tensor has its own), each of which replaces an
    older one when it is whole. Call it on every rank: all return when all is durable, or raise what
    failed on the first. Memory: one whole tensor.
    """
    if isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
        message = f"max_shard_bytes={max_shard_bytes!r} was given: it is a number of bytes above 0."
        raise OptionError(message)
    _settle(model)
    shards = _shards(dict(_contents(model)), max_shard_bytes)
    group = host_group()
    first = group is None or dist.get_rank(group) == 0
    folder = Path(path)
    failure: Exception | None = None
    try:
        if first:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        failure = error
    for shard in shards:
        if first:
            failure = _write(shard, folder, failure)
        else:
            _gather(shard)
    if first and failure is None:
        failure = _finish(folder, shards)
    _agree(failure, folder, group)


def _settle(model: nn.Module) -> None:
    """Do what ``state_dict()`` does before it reads: wait for updates, let go of gathered ones."""
    for module in model.modules():
        for hook in module._state_dict_pre_hooks.values():  # noqa: SLF001
            hook(module, "", False)  # noqa: FBT003  # torch's own call


def _contents(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001
                yield (f"{prefix}.{name}" if prefix else name), buffer


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
        entries = {n: Entry(t.dtype, tuple(t.shape)) for n, t in part.items()}
        shards.append(_Shard(name, part, lay_out(entries, _METADATA)))
    return shards


@torch.no_grad()
def _whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()
    return full.cpu()


def _gather(shard: _Shard) -> None:
    for tensor in shard.tensors.values():
        _whole(tensor)


def _write(shard: _Shard, folder: Path, failure: Exception | None) -> Exception | None:
    """Write a file; return what failed, for the other ranks wait for their tensors' gathers."""
    left = list(shard.tensors.items())
    try:
        if failure is None:
            with ExitStack() as opened:
                file = opened.enter_context(replacing(folder / shard.name, shard.table.nbytes))
                file.write(torch.frombuffer(bytearray(shard.table.header), dtype=torch.uint8), 0)
                while left:
                    _put(file, shard.table, *left.pop(0))
    except (OSError, OptionError) as error:
        failure = error
    for _, tensor in left:
        _whole(tensor)
    return failure


def _put(file: PieceFile, table: Table, name: str, tensor: torch.Tensor) -> None:
    file.write(_whole(tensor), table.entries[name].offset)


def _finish(folder: Path, shards: Sequence[_Shard]) -> Exception | None:
    """Write the index where there are several files, and remove what an earlier set has more."""
    names = {shard.name for shard in shards}
    where = {name: shard.name for shard in shards for name in shard.tensors}
    total = sum(e.nbytes for shard in shards for e in shard.table.entries.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    text = json.dumps(index, indent=2).encode()
    try:
        if len(shards) > 1:
            with replacing(folder / _INDEX, len(text)) as file:
                file.write(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
        else:
            (folder / _INDEX).unlink(missing_ok=True)
        for old in (folder / _ONE, *folder.glob("model-*-of-*.safetensors")):
            if old.name not in names:
                old.unlink(missing_ok=True)
    except OSError as error:
        return error
    return None


def _agree(failure: Exception | None, folder: Path, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank what failed on the first."""
    told: list[object] = [None if failure is None else repr(failure)]
    if group is not None:
        dist.broadcast_object_list(told, group_src=0, group=group)
    if failure is not None:
        raise failure
    if told[0] is not None:
        message = f"The first rank could not write the model to {folder}: {told[0]}. See there."
        raise StowError(message)
