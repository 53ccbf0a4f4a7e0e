"""Checkpoints by ColossalAI's calls: whole tensors, in one file or in several with an index.

Every rank takes part: tensors are gathered one after the other, and rank 0 writes. Files are those
of torch (``pytorch_model.bin``) or safetensors, by transformers' names; states are by the
optimizer's order, as torch's Adam numbers them. A file is replaced when its successor is complete,
and several with an index when all of them are: one that was cut off is never read as a mixture of
two. Weights are in the parameters' dtype, states and master weights
as the optimizer keeps them, so a resumed run goes on bit for bit.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.colossalai.interface import ModelWrapper, OptimizerWrapper
from tensorstow.fsdp.export import (
    save_safetensors,
    save_safetensors_file,
    write_configuration,
)
from tensorstow.fsdp.full_tensors import whole_weights
from tensorstow.fsdp.sharding import on_every_rank

Checkpoint = str | os.PathLike[str]
_WEIGHTS, _STATES, _GROUPS = "pytorch_model", "pytorch_optim", "pytorch_optim_group.bin"
_SUFFIX = ".bin"
_OF_SAFETENSORS = ".safetensors"


def save_model(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    shard: bool,
    prefix: str | None,
    shard_bytes: int,
    use_safetensors: bool,
) -> None:
    """Write the weights and persistent buffers; collective.

    Args:
        model: The model.
        checkpoint: The file, or the directory where ``shard`` is set.
        shard: Whether there are several files and an index.
        prefix: Put before each name. None: nothing.
        shard_bytes: The largest size of one of several files.
        use_safetensors: Whether files are safetensors rather than torch's, as one file is whose
            name ends so.

    Raises:
        OptionError: Arguments that cannot be honoured together.
        StowError: Rank 0 could not write, which raises what it met.
    """
    module = _module_of(model)
    path = Path(checkpoint)
    if use_safetensors or (path.suffix == _OF_SAFETENSORS and not shard):
        _save_safetensors(module, path, prefix, shard_bytes if shard else None)
        return
    before = f"{prefix}." if prefix else ""
    weights = ((before + name, values) for name, values in whole_weights(module))
    if shard:
        _write_shards(path, _WEIGHTS, weights, shard_bytes)
        _on_rank_0(path, lambda: write_configuration(module, path))
    else:
        whole = dict(weights) if _writes() else _drain(weights)
        _on_rank_0(path, lambda: _write(path, whole))


def _save_safetensors(
    module: nn.Module, path: Path, prefix: str | None, shard_bytes: int | None
) -> None:
    """Write a directory, or one file where ``shard_bytes`` is None."""
    if prefix or (shard_bytes is None and path.suffix != _OF_SAFETENSORS):
        message = (
            f"Safetensors were to be written to {path}, prefix={prefix!r}: they have the model's"
            f' names, and one file of them is called "...{_OF_SAFETENSORS}". Give shard=True, or'
            " such a name, and no prefix."
        )
        raise OptionError(message)
    if shard_bytes is None:
        save_safetensors_file(module, path)
    else:
        save_safetensors(module, path, max_shard_bytes=shard_bytes)


def load_model(model: nn.Module, checkpoint: Checkpoint, *, strict: bool) -> None:
    """Load weights and buffers that ``save_model``, torch or transformers wrote; collective.

    Args:
        model: The model.
        checkpoint: A file, an index, or a directory that has one.
        strict: Whether the names must be the model's.

    Raises:
        StoreFormatError: There is no checkpoint.
        OptionError: The names are others.
    """
    module = _module_of(model)
    own = set(module.state_dict())
    missing, unexpected = set(own), set()
    for file in _files_of(Path(checkpoint), (f"model{_OF_SAFETENSORS}", _WEIGHTS + _SUFFIX)):
        found = _read(file)
        module.load_state_dict({n: v for n, v in found.items() if n in own}, strict=False)
        missing -= found.keys()
        unexpected |= found.keys() - own
    tied = _tied(module)
    missing = {name for name in missing if not tied.get(name, set()) - missing}
    if strict and (missing or unexpected):
        message = (
            f"{checkpoint} is of another model: it lacks {sorted(missing)} and also has"
            f" {sorted(unexpected)}. Pass strict=False to load what both have."
        )
        raise OptionError(message)


def save_optimizer(
    optimizer: Optimizer,
    checkpoint: Checkpoint,
    *,
    shard: bool,
    prefix: str | None,
    shard_bytes: int,
) -> None:
    """Write states and groups; collective.

    Args:
        optimizer: What ``boost`` returned.
        checkpoint: The file, or the directory where ``shard`` is set.
        shard: Whether there are several files and an index.
        prefix: Put before the names of files. None: nothing.
        shard_bytes: The largest size of one of several files.

    Raises:
        OptionError: The file is called as safetensors are.
        StowError: Rank 0 could not write, which raises what it met.
    """
    path = Path(checkpoint)
    if path.suffix == _OF_SAFETENSORS:
        message = (
            f"States were to be written to {path}: they and their groups are files of torch. Give"
            ' another name, such as "optimizer.pt".'
        )
        raise OptionError(message)
    wrapper = _wrapper_of(optimizer)
    saved = wrapper.own_state_dict()
    rest = {key: value for key, value in saved.items() if key != "state"}
    states = wrapper.whole_states(saved["state"])
    if not shard:
        whole = dict(states) if _writes() else _drain(states)
        _on_rank_0(path, lambda: _write(path, {"state": whole, **rest}))
        return
    name = f"{prefix}.{_STATES}" if prefix else _STATES
    groups = f"{prefix}.{_GROUPS}" if prefix else _GROUPS
    _write_shards(path, name, states, shard_bytes, param_groups=(groups, rest))


def load_optimizer(optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Load what ``save_optimizer`` wrote; collective.

    Args:
        optimizer: What ``boost`` returned.
        checkpoint: The file, the index, or the directory that has one.

    Raises:
        StoreFormatError: There is no checkpoint.
        OptionError: The states do not fit their parameters.
    """
    wrapper, path = _wrapper_of(optimizer), Path(checkpoint)
    index = _index_of(path)
    if index is None:
        if not path.is_file():
            message = f"{path} is no file, and no directory with an index: nothing was saved there."
            raise StoreFormatError(message)
        wrapper.load_state_dict(_read(path))
        return
    metadata = json.loads(index.read_text())["metadata"]
    rest = _read(index.parent / metadata["param_groups"])
    states: dict[int, Any] = {}
    for file in _files_of(index, ()):
        states |= _read(file)
    wrapper.load_state_dict({"state": states, **rest})


def save_lr_scheduler(scheduler: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401
    """Write a scheduler's state, on rank 0; collective.

    Args:
        scheduler: The scheduler.
        checkpoint: The file.

    Raises:
        StowError: Rank 0 could not write, which raises what it met.
    """
    path = Path(checkpoint)
    _on_rank_0(path, lambda: _write(path, scheduler.state_dict()))


def load_lr_scheduler(scheduler: Any, checkpoint: Checkpoint) -> None:  # noqa: ANN401
    """Load what ``save_lr_scheduler`` wrote.

    Args:
        scheduler: The scheduler.
        checkpoint: The file.
    """
    scheduler.load_state_dict(_read(Path(checkpoint)))


# --- what is written ---


def _write_shards(
    folder: Path,
    name: str,
    items: Iterable[tuple[Any, Any]],
    most: int,
    **alone: tuple[str, object],
) -> None:
    """Write items to files of at most ``most`` bytes, and the index behind the last.

    ``alone``: files of their own and what is in them, by what the index calls them. Older files are
    replaced when all new ones are complete; the older index goes first, so that no loader reads
    files of both.
    """
    where: dict[str, str] = {}
    part: dict[Any, Any] = {}
    files: list[Path] = []
    total = held = number = 0

    def write(file: str, what: object) -> None:
        new = _beside(folder / file)
        _on_rank_0(folder, lambda: _put(new, lambda opened: torch.save(what, opened)))
        files.append(folder / file)

    def flush() -> None:
        nonlocal held, number
        number += 1
        file = f"{name}-{number:05}{_SUFFIX}"
        where.update(dict.fromkeys(map(str, part), file))
        write(file, dict(part))
        part.clear()
        held = 0

    def publish() -> None:
        index = {"total_size": total, **{key: file for key, (file, _) in alone.items()}}
        text = json.dumps({"metadata": index, "weight_map": where}, indent=2)
        target = folder / f"{name}{_SUFFIX}.index.json"
        target.unlink(missing_ok=True)
        for file in files:
            _beside(file).replace(file)
        _replace(target, lambda opened: opened.write(text.encode()))

    try:
        for file, what in alone.values():
            write(file, what)
        for key, value in items:
            nbytes = _bytes_of(value)
            if part and held + nbytes > most:
                flush()
            part[key] = value if _writes() else None
            held += nbytes
            total += nbytes
        flush()
        told = f"replace the files in {folder} (save again: they are no checkpoint as they are)"
        on_every_rank(lambda: publish() if _writes() else None, told)
    finally:
        for target in files if _writes() else ():
            _beside(target).unlink(missing_ok=True)


def _bytes_of(value: Any) -> int:  # noqa: ANN401
    tensors = value.values() if isinstance(value, dict) else [value]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _drain(items: Iterable[object]) -> dict[Any, Any]:
    """Take part in gathering what rank 0 keeps."""
    for _ in items:
        pass
    return {}


def _writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _on_rank_0(path: Path, write: Callable[[], object]) -> None:
    """Write on rank 0, and raise on every rank what failed there."""
    what = f"write {path} (what was there before is still there)"
    on_every_rank(lambda: write() if _writes() else None, what)


def _write(path: Path, what: object) -> None:
    _replace(path, lambda file: torch.save(what, file))


def _replace(path: Path, write: Callable[[Any], object]) -> None:
    """Write a file beside ``path``, durably, and put it in its place."""
    beside = _beside(path)
    _put(beside, write)
    try:
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.new")


def _put(path: Path, write: Callable[[Any], object]) -> None:
    """Write a file, durably, or leave none; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        try:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink()
            raise


# --- what is read ---


def _read(path: Path) -> Any:  # noqa: ANN401  # a dict of what the file has
    if not path.is_file():
        message = f"{path} is not there: nothing was saved under that name."
        raise StoreFormatError(message)
    if path.suffix == _OF_SAFETENSORS:
        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _index_of(path: Path) -> Path | None:
    """Return the index that ``path`` is, or the only one that it has; None: there is none."""
    if path.is_file():
        return path if path.name.endswith(".index.json") else None
    found = sorted(path.glob("*.index.json"))
    if len(found) > 1:
        message = f"{path} has several indices ({', '.join(f.name for f in found)}): name one."
        raise OptionError(message)
    return found[0] if found else None


def _files_of(path: Path, alone: tuple[str, ...]) -> list[Path]:
    """Return the files of a checkpoint; ``alone``: names of one without an index, in a folder."""
    index = _index_of(path)
    if index is not None:
        names = json.loads(index.read_text())["weight_map"].values()
        return [index.parent / name for name in dict.fromkeys(names)]
    for name in alone:
        if (path / name).is_file():
            return [path / name]
    if path.is_dir() or not path.exists():
        message = f"{path} has no weights and no index: nothing was saved there."
        raise StoreFormatError(message)
    return [path]


def _tied(module: nn.Module) -> dict[str, set[str]]:
    """Return the names of the same tensor, by each name that has others."""
    names: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return {name: same for same in names.values() if len(same) > 1 for name in same}


def _module_of(model: nn.Module) -> nn.Module:
    return model.unwrap() if isinstance(model, ModelWrapper) else model


def _wrapper_of(optimizer: Optimizer) -> OptimizerWrapper:
    if isinstance(optimizer, OptimizerWrapper):
        return optimizer
    message = (
        f"A {type(optimizer).__name__} was given: give the optimizer that boost() returned, which"
        " has the states of what was placed."
    )
    raise OptionError(message)
