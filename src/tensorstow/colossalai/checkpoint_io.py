"""Checkpoints by ColossalAI's calls: whole tensors, in one file or in several with an index.

Every rank takes part: tensors are gathered one after the other, and rank 0 writes. Files are those
of torch (``pytorch_model.bin``) or safetensors, with transformers' names; states are numbered in
the optimizer's order, as torch's Adam does. A file is replaced when its successor is complete, and
several with an index when all of them are: a save that is cut off never mixes two checkpoints. A
list has the digests of the files, which are verified before anything is loaded. Weights have the
parameters' dtype, states and master weights the optimizer's formats, so a resumed run goes on bit
for bit.
"""

import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.directories import make_folder, path_inside
from tensorstow.base.errors import OptionError, StoreFormatError, named
from tensorstow.base.fields import PositiveFloat, read_value
from tensorstow.base.new_file import NewFiles
from tensorstow.base.regular_file import check_regular, is_there, read_text, remove_file
from tensorstow.base.sizes import parts_within
from tensorstow.checkpoint.torch_file import load_torch_file
from tensorstow.checkpoint.weight_files import INDEX_SUFFIX, index_of
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.doorkit.checkpoint_checks import reading, refuse_other_names, refuse_other_shape
from tensorstow.doorkit.keyword_table import checks_keywords, honoured, no_effect, refused
from tensorstow.fsdp.export import save_safetensors, save_safetensors_file, write_configuration
from tensorstow.fsdp.full_tensors import whole_weights
from tensorstow.fsdp.sharding import on_every_rank, rank_here, verify_together
from tensorstow.io.digest_list import SUFFIX, DigestList, verify

Checkpoint = str | os.PathLike[str]
_WEIGHTS, _STATES, _GROUPS = "pytorch_model", "pytorch_optim", "pytorch_optim_group.bin"
_SUFFIX, _INDEX = ".bin", INDEX_SUFFIX
_OF_SAFETENSORS = ".safetensors"

_LOADING = no_effect("one thread reads one file at a time", "low_cpu_mem_mode", "num_threads")
_SAVING = {
    "shard": honoured(
        "Whether there are several files and an index, one tensor at a time in memory."
    ),
    "size_per_shard": honoured("The largest size of one of several files, in MiB."),
    **no_effect(
        "the call returns when the files are durable. Commits are written during training:"
        " tensorstow.stow(model, optimizer, dir=...)",
        "use_async",
    ),
    **refused(
        "tensors are written whole. To write each rank's part, use torch.distributed.checkpoint, or"
        " tensorstow.save_safetensors(by_rank=True)",
        "gather_dtensor",
    ),
}


class CheckpointCalls:
    """The calls of ``Booster`` that write and read checkpoints."""

    @checks_keywords(_SAVING)
    def save_model(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_safetensors: bool = False,
        use_async: bool = False,
    ) -> None:
        """Write the weights and persistent buffers; call it on every rank.

        Args:
            model: What ``boost`` returned.
            checkpoint: A file that torch loads; with ``shard`` a directory.
            prefix: Prefix of each name. Default: None, no prefix.
            use_safetensors: Whether files are safetensors. A single file also is if its name ends
                with ".safetensors".

        Raises:
            OptionError: Arguments that are not supported.
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        shard_bytes = _shard_bytes(size_per_shard)
        module, path = _module_of(model), Path(checkpoint)
        if use_safetensors or (path.suffix == _OF_SAFETENSORS and not shard):
            _save_safetensors(module, path, prefix, shard_bytes if shard else None)
            return
        before = f"{prefix}." if prefix else ""
        weights = ((before + name, values) for name, values in whole_weights(module))
        if shard:
            _write_shards(path, _WEIGHTS, weights, shard_bytes)
            _on_rank_0(path, lambda: write_configuration(module, path))
        else:
            whole = {name: values for name, values in weights if _writes()}
            _on_rank_0(path, lambda: _write(path, whole))

    @checks_keywords(_LOADING)
    def load_model(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        strict: bool = True,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load weights that ``save_model``, torch or transformers wrote; call it on every rank.

        Args:
            model: What ``boost`` returned.
            checkpoint: A file, an index, or a directory with one or the other.
            strict: Whether the names must be the model's.

        Raises:
            StoreFormatError: There is no checkpoint.
            OptionError: The names differ.
        """
        module = _module_of(model)
        module_state = module.state_dict()
        main = _main_of(Path(checkpoint), f"model{_OF_SAFETENSORS}", _WEIGHTS + _SUFFIX)
        verify_together(main)
        saved: dict[str, torch.Tensor] = {}
        for file in _listed(main) if main.name.endswith(_INDEX) else [main]:
            saved |= _read(file, torch.Tensor)
        tied, absent = _tied(module), module_state.keys() - saved.keys()
        # A tied weight may be saved by another one of its names.
        spared = {name for name in absent if tied.get(name, set()) - absent}
        if strict:
            refuse_other_names(checkpoint, saved, module_state.keys() - spared, "strict")
        both = {name: values for name, values in saved.items() if name in module_state}
        for name, values in both.items():
            refuse_other_shape(checkpoint, name, values.shape, module_state[name].shape)
        module.load_state_dict(both, strict=False)

    @checks_keywords(_SAVING)
    def save_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: Checkpoint,
        shard: bool = False,
        gather_dtensor: bool = True,
        prefix: str | None = None,
        size_per_shard: int = 1024,
        use_async: bool = False,
    ) -> None:
        """Write states, groups and the loss scale; call it on every rank.

        Args:
            optimizer: What ``boost`` returned.
            checkpoint: A file that torch's Adam loads; with ``shard`` a directory.
            prefix: Prefix of the names of several files. Default: None, no prefix.

        Raises:
            OptionError: Arguments that are not supported.
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        shard_bytes, path = _shard_bytes(size_per_shard), Path(checkpoint)
        if path.suffix == _OF_SAFETENSORS:
            message = (
                f"States were to be written to {path}: they and their groups are files of torch."
                ' Pass another name, such as "optimizer.pt".'
            )
            raise OptionError(message)
        wrapper = boosted(optimizer, "save_optimizer()")
        saved = wrapper.own_state_dict()
        rest = {key: value for key, value in saved.items() if key != "state"}
        states = wrapper.whole_states(saved["state"])
        if not shard:
            whole = {index: entry for index, entry in states if _writes()}
            _on_rank_0(path, lambda: _write(path, {"state": whole, **rest}))
            return
        name = f"{prefix}.{_STATES}" if prefix else _STATES
        groups = f"{prefix}.{_GROUPS}" if prefix else _GROUPS
        _write_shards(path, name, states, shard_bytes, param_groups=(groups, rest))

    @checks_keywords(_LOADING)
    def load_optimizer(
        self,
        optimizer: Optimizer,
        checkpoint: Checkpoint,
        low_cpu_mem_mode: bool = True,
        num_threads: int = 1,
    ) -> None:
        """Load what ``save_optimizer`` or torch's Adam wrote; call it on every rank.

        Args:
            optimizer: What ``boost`` returned.
            checkpoint: A file, an index, or the directory that has one.

        Raises:
            StoreFormatError: There is no checkpoint.
            OptionError: States that do not fit their parameters.
        """
        wrapper = boosted(optimizer, "load_optimizer()")
        main = _main_of(Path(checkpoint))
        verify_together(main)
        groups, *files = _listed(main, "param_groups") if main.name.endswith(_INDEX) else [main]
        saved = _read(groups)
        states = {key: entry for file in files for key, entry in _read(file).items()}
        saved = {**saved, "state": states} if files else saved
        for key in ("state", "param_groups"):
            if key not in saved:
                message = f"{groups} has no {key!r}, as states of an optimizer have."
                raise StoreFormatError(message)
        wrapper.load_state_dict(saved)

    def save_lr_scheduler(self, lr_scheduler: Any, checkpoint: Checkpoint) -> None:
        """Write a scheduler's state; call it on every rank.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: The file.

        Raises:
            StowError: Rank 0 could not write; it is raised on every rank.
        """
        path = Path(checkpoint)
        _on_rank_0(path, lambda: _write(path, lr_scheduler.state_dict()))

    def load_lr_scheduler(self, lr_scheduler: Any, checkpoint: Checkpoint) -> None:
        """Load what ``save_lr_scheduler`` wrote.

        Args:
            lr_scheduler: The scheduler.
            checkpoint: The file.

        Raises:
            StoreFormatError: There is no such file.
        """
        verify(Path(checkpoint))
        lr_scheduler.load_state_dict(_read(Path(checkpoint)))


# --- writing ---


def _save_safetensors(
    module: nn.Module, path: Path, prefix: str | None, shard_bytes: int | None
) -> None:
    """Write a directory, or one file if ``shard_bytes`` is None."""
    if prefix or (shard_bytes is None and path.suffix != _OF_SAFETENSORS):
        message = (
            f"Safetensors were to be written to {path}, prefix={prefix!r}: they have the model's"
            f' names, and a single file is called "...{_OF_SAFETENSORS}". Pass shard=True, or'
            " such a name, and no prefix."
        )
        raise OptionError(message)
    if shard_bytes is None:
        save_safetensors_file(module, path)
    else:
        save_safetensors(module, path, max_shard_bytes=shard_bytes)


def _shard_bytes(size_per_shard: int) -> int:
    """Return the largest size of one of several files; raises OptionError for a bad argument."""
    return int(read_value(PositiveFloat, size_per_shard, "size_per_shard") * 2**20)


def _write_shards(
    folder: Path,
    name: str,
    items: Iterable[tuple[Any, Any]],
    most: int,
    **alone: tuple[str, object],
) -> None:
    """Write items to files of at most ``most`` bytes, and after the last one the index.

    ``alone``: further files with their content, by their keys in the index. Older files are
    replaced when all new ones are complete; the older index is removed first, so that no loader
    mixes old and new files.
    """
    file_of: dict[str, str] = {}
    total = number = 0

    def write(file: str, content: object) -> None:
        def save() -> None:
            make_folder(folder)
            with listed.stream(new_files.create(folder / file)) as stream:
                torch.save(content, stream)

        _on_rank_0(folder, save)

    def publish() -> None:
        text = index_of(file_of, total, **{key: file for key, (file, _) in alone.items()})
        new_files.keep()
        listed.remove()
        remove_file(listed.main)
        new_files.publish()
        listed.write_main(lambda stream: stream.write(text))

    listed = DigestList(folder / f"{name}{_SUFFIX}{_INDEX}")
    with NewFiles() as new_files:
        for file, content in alone.values():
            write(file, content)
        # All ranks gather, which is collective; those that do not write keep nothing.
        sized = ((key, value if _writes() else None, _bytes_of(value)) for key, value in items)
        for part in parts_within(sized, most, itemgetter(2)):
            number += 1
            file = f"{name}-{number:05}{_SUFFIX}"
            file_of.update(dict.fromkeys((str(key) for key, *_ in part), file))
            total += sum(nbytes for *_, nbytes in part)
            write(file, {key: value for key, value, _ in part})
            part.clear()  # its tensors are freed before the next ones are gathered
        purpose = f"replace the files in {folder} (save again: they are not a whole checkpoint)"
        on_every_rank(lambda: publish() if _writes() else None, purpose)


def _bytes_of(value: Any) -> int:
    tensors = value.values() if isinstance(value, dict) else [value]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _writes() -> bool:
    return rank_here() == 0


def _on_rank_0(path: Path, write: Callable[[], object]) -> None:
    """Write on rank 0; raise an error on every rank if that fails."""
    purpose = f"write {path} (an older file is unchanged)"
    on_every_rank(lambda: write() if _writes() else None, purpose)


def _write(path: Path, content: object) -> None:
    """Write a file of torch, durably; it replaces ``path`` when it is complete."""
    make_folder(path.parent)
    DigestList(path).write_main(partial(torch.save, content))


# --- reading ---


def _read(path: Path, kind: type = object) -> dict[Any, Any]:
    """Return the dict in a file, whose values have one type; a file of tensors is mapped."""
    if not is_there(path):
        message = f"{path} does not exist: nothing was saved under that name."
        raise StoreFormatError(message)
    with reading(path), named("File", path):
        check_regular(path)
        content: Any = (
            load_file(path)
            if path.suffix == _OF_SAFETENSORS
            else load_torch_file(path, maps=kind is torch.Tensor)
        )
    if isinstance(content, dict) and all(isinstance(value, kind) for value in content.values()):
        return content
    message = f"{path} is not a checkpoint: not every name in it has a {kind.__name__}."
    raise StoreFormatError(message)


def _main_of(path: Path, *alone: str) -> Path:
    """Return the main file of a checkpoint: ``path``, or the index in that directory.

    ``alone``: names of a file without an index, in a directory.
    """
    if _is_saved(path):
        return path
    # An index that is gone but has a list of digests counts: its check then says what is lost.
    listed = {file.with_suffix("") for file in path.glob(f"*{_INDEX}{SUFFIX}")}
    indices = sorted({*path.glob(f"*{_INDEX}"), *listed})
    if len(indices) > 1:
        message = f"{path} has several indices ({', '.join(f.name for f in indices)}): name one."
        raise OptionError(message)
    for file in (*indices, *(path / name for name in alone)):
        if _is_saved(file):
            return file
    missing = (
        "has no weights and no index" if alone else "is not a file or a directory with an index"
    )
    message = f"{path} {missing}: nothing was saved under that name."
    raise StoreFormatError(message)


def _is_saved(path: Path) -> bool:
    """Return whether a file has this name, of whatever kind, or a list of digests is for it."""
    is_file = is_there(path) and not path.is_dir()
    return is_file or is_there(DigestList(path).path)


def _listed(index: Path, *alone: str) -> list[Path]:
    """Return the files that an index lists; first those that its metadata calls ``alone``."""
    with reading(index):
        read = json.loads(read_text(index))
        names = [read["metadata"][key] for key in alone] + list(read["weight_map"].values())
        return [path_inside(index.parent, name, index) for name in dict.fromkeys(names)]


def _tied(module: nn.Module) -> dict[str, set[str]]:
    """Return all names of each tensor that has several, by each of them."""
    names: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {name: same for same in names.values() if len(same) > 1 for name in same}


def _module_of(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def boosted(optimizer: object, call: str) -> OptimizerWrapper:
    """Return what ``boost`` returned; raises OptionError for another optimizer."""
    if not isinstance(optimizer, OptimizerWrapper):
        message = (
            f"{call} was given a {type(optimizer).__name__}: pass the optimizer that boost()"
            " returned, which updates the placed model."
        )
        raise OptionError(message)
    return optimizer
