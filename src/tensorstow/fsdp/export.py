"""Exports a stowed model to safetensors files that other libraries load, a tensor at a time.

Every rank takes part, because tensors are all-gathered. Rank 0 writes, or each rank its own files.
``stow(weights=...)`` and transformers' ``from_pretrained`` read the files: tied parameters are
stored once, under their first name, and several files have an index. The configuration of a
transformers model is written next to them.
"""

import copy
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorstow.base.directories import expand_path, make_folder
from tensorstow.base.errors import OptionError
from tensorstow.base.keywords import names_keywords
from tensorstow.base.new_file import RANDOM, NewFiles, replace_files, sync_directory
from tensorstow.base.regular_file import remove_file
from tensorstow.base.sizes import parts_within
from tensorstow.checkpoint.pretrained import is_of_transformers
from tensorstow.checkpoint.weight_files import INDEX, ONE, index_of, shard_name
from tensorstow.fsdp.named_weights import ModelWeights
from tensorstow.fsdp.sharding import gather_digests, host_group, on_every_rank
from tensorstow.io.digest_list import DigestList, RunningDigest
from tensorstow.io.mapped import NewSafetensors
from tensorstow.io.safetensors import Entry, Table, lay_out

_SHARDS = "model-*-of-*.safetensors"


@dataclass(frozen=True, slots=True)
class _Shard:
    """One file."""

    name: str
    table: Table


@names_keywords
def save_safetensors(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int = 5 << 30,
    by_rank: bool = False,
) -> None:
    """Write the full weights and persistent buffers of a model as safetensors that others load.

    Call it on every rank. It returns when all files are durable. A call that fails while it writes
    leaves older files as they are. A call that is killed after that leaves a directory that does
    not load: files of two models are never read as one. The directory needs room for both. For a
    model of transformers, config.json and generation_config.json are written too, so that
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
        StowError: Another rank failed to write, and raises its own error.
    """
    if isinstance(max_shard_bytes, bool) or max_shard_bytes < 1:
        message = f"max_shard_bytes={max_shard_bytes!r} was given: it is a number of bytes above 0."
        raise OptionError(message)
    weights = ModelWeights(model)
    group = host_group()
    writers = dist.get_world_size(group) if by_rank and group is not None else 1
    contents = weights.tensors
    # Rounded up. ``by_rank`` cuts files at this size, to spread the writing over all ranks.
    share = -(-sum(t.numel() * t.element_size() for t in contents.values()) // writers)
    shards = _shards(contents, min(max_shard_bytes, max(share, 1)) if by_rank else max_shard_bytes)
    folder = expand_path(path)
    rank, task = _rank(), f"write the model to {folder}"
    on_every_rank(lambda: make_folder(folder) if rank < writers else None, task)
    listed = DigestList(folder / (INDEX if len(shards) > 1 else ONE))
    with NewFiles() as new_files:
        # In a round each writer has one file, and all ranks take part in the gathers of all files.
        for at in range(0, len(shards), writers):
            files = shards[at : at + writers]
            on_every_rank(partial(_write, weights, files, rank, listed, new_files), task)
        # The new files are complete before the older ones go: one of both sets is always on disk.
        on_every_rank(new_files.keep, task)
        _on_rank_0(partial(_remove_older, folder, len(shards)), task)
        on_every_rank(new_files.publish, task)
    # The index and the list of digests come last: by now the files that they name are complete.
    gather_digests(listed)
    _on_rank_0(partial(_finish, model, listed, shards), task)


def save_safetensors_file(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a model like ``save_safetensors``, to one file of any name and without a configuration.

    Call it on every rank; rank 0 writes. It returns when the file is durable.

    Args:
        model: A stowed model, or any other.
        path: The file. An older one is replaced when the new one is complete.

    Raises:
        StowError: Rank 0 failed to write, and raises its own error.
    """
    weights = ModelWeights(model)
    file = expand_path(path)
    task = f"write the model to {file}"
    _on_rank_0(partial(make_folder, file.parent), task)
    whole = _shard_of(file.name, weights.tensors)
    listed = DigestList(file)
    with NewFiles() as new_files:
        on_every_rank(partial(_write, weights, [whole], _rank(), listed, new_files), task)
        # The older list has the digest of the older file, and goes before that file is replaced.
        _on_rank_0(listed.remove, task)
        on_every_rank(new_files.publish, task)
    _on_rank_0(listed.write, task)


def _rank() -> int:
    """Return this rank among those that write together."""
    group = host_group()
    return 0 if group is None else dist.get_rank(group)


def _on_rank_0(act: Callable[[], object], task: str) -> None:
    on_every_rank(act if _rank() == 0 else lambda: None, task)


def _shards(contents: Mapping[str, torch.Tensor], most: int) -> list[_Shard]:
    """Return the files, in the order of the model."""
    nbytes = {name: t.numel() * t.element_size() for name, t in contents.items()}
    parts = list(parts_within(contents, most, nbytes.__getitem__))
    count = len(parts)
    shards = []
    for number, part in enumerate(parts, 1):
        name = shard_name("model", "safetensors", number, count)
        shards.append(_shard_of(name, {n: contents[n] for n in part}))
    return shards


def _shard_of(name: str, part: Mapping[str, torch.Tensor]) -> _Shard:
    entries = {n: Entry(t.dtype, tuple(t.shape)) for n, t in part.items()}
    return _Shard(name, lay_out(entries))


def _write(
    weights: ModelWeights,
    shards: Sequence[_Shard],
    rank: int,
    listed: DigestList,
    new_files: NewFiles,
) -> None:
    """Write files in parallel, each by one rank, and note their digests.

    An exception is raised after the last gather, because the other ranks wait for all of them.
    """
    shard_of_rank = shards[rank] if rank < len(shards) else None
    turns = deque(_in_turns(shards))
    try:
        with ExitStack() as opened:
            file = new = None
            if shard_of_rank is not None:
                new = new_files.create(listed.main.with_name(shard_of_rank.name))
                running = RunningDigest()
                file = opened.enter_context(NewSafetensors(new, shard_of_rank.table, running))
            while turns:
                shard, name = turns.popleft()
                # Ranks that do not write this file take part in the gather too.
                tensor = weights.whole(name).cpu()
                if file is not None and shard is shard_of_rank:
                    file.put(name, tensor)
        if new is not None:
            new.seal()
            listed.note(new.path, running.digest())
    except Exception:
        for _, name in turns:  # take part in the gathers that the other ranks wait for
            weights.whole(name)
        raise


def _in_turns(shards: Sequence[_Shard]) -> Iterator[tuple[_Shard, str]]:
    """Yield a tensor of each file, then the next of each, so that all writers are busy.

    Tensors of one file come in the order of the file.
    """
    for names in zip_longest(*(shard.table.entries for shard in shards)):
        yield from ((s, n) for s, n in zip(shards, names, strict=True) if n is not None)


def _remove_older(folder: Path, count: int) -> None:
    """Remove files older than ``count`` new ones, the index first.

    A new file replaces one of its name atomically.
    """
    index, one = DigestList(folder / INDEX), DigestList(folder / ONE)
    ones = [one.main] if count > 1 else []
    for old in (index.main, index.path, one.path, *ones, *sorted(folder.glob(_SHARDS))):
        remove_file(old)
    sync_directory(folder)


def _finish(model: nn.Module, listed: DigestList, shards: Sequence[_Shard]) -> None:
    """Write the index if there are several files, their list, and the model's configuration."""
    if len(shards) > 1:
        weight_map = {name: shard.name for shard in shards for name in shard.table.entries}
        total = sum(e.nbytes for shard in shards for e in shard.table.entries.values())
        listed.write_main(lambda stream: stream.write(index_of(weight_map, total)))
    else:
        listed.write()
    folder = listed.main.parent
    for left in folder.glob(f".model*.safetensors.{RANDOM}"):  # by an export that was killed
        remove_file(left)
    write_configuration(model, folder)


def write_configuration(model: nn.Module, folder: Path) -> None:
    """Write the configuration files of transformers' ``save_pretrained``, for its models alone."""
    if not is_of_transformers(model):
        return
    pretrained: Any = model
    config = copy.deepcopy(pretrained.config)
    # fully_shard() has put "FSDP" before the name of the class.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = str(pretrained.dtype).removeprefix("torch.")
    replace_files(folder, config.save_pretrained)
    if pretrained.can_generate() and pretrained.generation_config is not None:
        replace_files(folder, pretrained.generation_config.save_pretrained)
