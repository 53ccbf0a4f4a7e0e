"""``deepspeed.utils.zero_to_fp32``: whole fp32 weights of a checkpoint that an engine saved.

No engine and no other rank is needed. As a command:
``python -m tensorstow.deepspeed.utils.zero_to_fp32 checkpoints output``.
"""

import os
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from tensorstow.base.directories import make_folder
from tensorstow.base.errors import StoreFormatError
from tensorstow.base.new_file import NewFile
from tensorstow.base.sizes import parse_size, parts_within
from tensorstow.checkpoint.weight_files import INDEX_SUFFIX, index_of, shard_name
from tensorstow.deepspeed.checkpoint.sharded import (
    SavedWeight,
    latest_tag,
    read_common,
    read_whole,
    saved_weights,
)
from tensorstow.io.digest_list import DigestList
from tensorstow.io.mapped import new_safetensors
from tensorstow.io.safetensors import Entry, lay_out

__all__ = [
    "convert_zero_checkpoint_to_fp32_state_dict",
    "get_fp32_state_dict_from_zero_checkpoint",
    "load_state_dict_from_zero_checkpoint",
]

Directory = str | os.PathLike[str]


@dataclass(frozen=True, eq=False, slots=True)
class _Weights:
    """The weights of a checkpoint, not read yet."""

    folder: Path
    saved: Mapping[str, SavedWeight]
    """Weights by name; tied ones by their first name."""
    tied: Mapping[str, Sequence[str]]
    """Further names of tied weights, by the first."""
    trained: frozenset[str]
    """Names of weights that are in fp32; others keep their dtype."""

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return whole tensors, trained weights in fp32."""
        whole = read_whole(self.folder, {name: self.saved[name] for name in names})
        return {n: t.float() if n in self.trained else t for n, t in whole.items()}

    def nbytes(self, name: str) -> int:
        """Return what a tensor has in memory once it is read."""
        saved = self.saved[name]
        itemsize = 4 if name in self.trained else saved.dtype.itemsize
        return saved.shape.numel() * itemsize


@dataclass(frozen=True, eq=False, slots=True)
class LazyWeight:
    """A weight of a checkpoint that ``contiguous()`` reads."""

    shape: torch.Size
    dtype: torch.dtype
    _weights: _Weights
    _name: str

    def contiguous(self) -> torch.Tensor:
        """Return its values, in host memory."""
        return self._weights.read([self._name])[self._name]


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: Directory,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, torch.Tensor] | dict[str, LazyWeight]:
    """Return the whole fp32 weights of a checkpoint and its buffers, in host memory.

    Args:
        checkpoint_dir: The directory that ``save_checkpoint`` was given.
        tag: The subdirectory. Default: None, the one that ``latest`` names.
        exclude_frozen_parameters: Whether parameters that were not trained are left out. They have
            the dtype that they were saved in.
        lazy_mode: Whether objects are returned that read a weight by ``contiguous()``.

    Raises:
        StoreFormatError: There is no checkpoint of this engine.
    """
    weights = _weights_of(checkpoint_dir, tag, frozen=not exclude_frozen_parameters)
    if lazy_mode:
        lazy = {}
        for name, saved in weights.saved.items():
            dtype = torch.float32 if name in weights.trained else saved.dtype
            lazy[name] = LazyWeight(saved.shape, dtype, weights, name)
        return {**lazy, **{n: lazy[k] for k, aliases in weights.tied.items() for n in aliases}}
    whole = weights.read(list(weights.saved))
    return {**whole, **{n: whole[k] for k, aliases in weights.tied.items() for n in aliases}}


def convert_zero_checkpoint_to_fp32_state_dict(  # upstream's
    checkpoint_dir: Directory,
    output_dir: Directory,
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the whole fp32 weights of a checkpoint to files; one of them is in memory at a time.

    A list of digests is written with them.

    Args:
        checkpoint_dir: The directory that ``save_checkpoint`` was given.
        output_dir: Is made if it is not there.
        max_shard_size: The bytes of a file; a larger tensor has one to itself. None: all in one.
        safe_serialization: Whether files are safetensors, with one name of each tied weight, rather
            than what ``torch.load`` reads.
        tag: The subdirectory. Default: None, the one that ``latest`` names.
        exclude_frozen_parameters: Whether parameters that were not trained are left out.

    Raises:
        StoreFormatError: There is no checkpoint of this engine.
    """
    weights = _weights_of(checkpoint_dir, tag, frozen=not exclude_frozen_parameters)
    output, most = Path(output_dir), None
    if max_shard_size is not None:
        most = parse_size(max_shard_size, "max_shard_size")
    stem, suffix = ("model", "safetensors") if safe_serialization else ("pytorch_model", "bin")
    parts = list(parts_within(weights.saved, most, weights.nbytes))
    make_folder(output)
    index = INDEX_SUFFIX if len(parts) > 1 else ""
    listed = DigestList(output / f"{stem}.{suffix}{index}")
    files: dict[str, str] = {}
    for number, names in enumerate(parts, start=1):
        file = shard_name(stem, suffix, number, len(parts))
        tensors = weights.read(names)
        if safe_serialization:
            _write_safetensors(tensors, output / file, listed)
        else:
            tensors |= {n: tensors[k] for k in names for n in weights.tied.get(k, ())}
            _write_torch_file(tensors, output / file, listed)
        files |= dict.fromkeys(tensors, file)
    if len(parts) > 1:
        total = sum(weights.nbytes(name) for name in weights.saved)
        text = index_of(dict(sorted(files.items())), total) + b"\n"
        listed.write_main(lambda stream: stream.write(text))
    else:
        listed.write()


def _write_torch_file(tensors: Mapping[str, torch.Tensor], path: Path, listed: DigestList) -> None:
    with NewFile(path) as file:
        with listed.stream(file) as stream:
            torch.save(tensors, stream)
        listed.remove()
        file.publish()


def _write_safetensors(tensors: Mapping[str, torch.Tensor], path: Path, listed: DigestList) -> None:
    entries = {name: Entry(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with new_safetensors(path, lay_out(entries), listed) as file:
        for name, tensor in tensors.items():
            file.put(name, tensor)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: Directory, tag: str | None = None
) -> nn.Module:
    """Load the whole fp32 weights of a checkpoint into a model in host memory.

    Args:
        model: A model that no engine has placed; it is moved to the CPU.
        checkpoint_dir: The directory that ``save_checkpoint`` was given.
        tag: The subdirectory. Default: None, the one that ``latest`` names.

    Returns:
        The model.

    Raises:
        StoreFormatError: There is no checkpoint of this engine.
    """
    model = model.cpu()
    model.load_state_dict(
        get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag), strict=False
    )
    return model


def _weights_of(directory: Directory, tag: str | None, *, frozen: bool) -> _Weights:
    tag = latest_tag(Path(directory)) if tag is None else tag
    if tag is None:
        message = (
            f"{directory} has no file latest, which names the newest checkpoint in it: pass the"
            " directory that you passed to save_checkpoint(), or a tag."
        )
        raise StoreFormatError(message)
    folder = Path(directory) / tag
    common = read_common(folder)
    left = set(common["frozen"])
    saved = {n: t for n, t in saved_weights(folder).items() if frozen or n not in left}
    tied = {name: aliases for name, aliases in common["tied"].items() if name in saved}
    trained = frozenset(saved) & {n for group in common["groups"] for n in group["params"]} - left
    return _Weights(folder, saved, tied, trained)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(description="Writes the fp32 weights of an engine's checkpoint.")
    parser.add_argument("checkpoint_dir", help="the directory passed to save_checkpoint()")
    parser.add_argument("output_dir", help="the directory of the files")
    parser.add_argument("--max_shard_size", default="5GB", help="the bytes of a file")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="the subdirectory; by default the newest one")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="leave out what was not trained"
    )
    return parser


if __name__ == "__main__":
    convert_zero_checkpoint_to_fp32_state_dict(**vars(_parser().parse_args()))
