"""`tensorstow quantize`: a model's folder, with the weights of its linear layers as codes.

The new folder has the shards, the index and the other files of the old one. It is written next to
its place under a random name, and gets its own when all of it is durable. A tensor is in memory in
pieces, and no tensor as a whole.
"""

import json
import os
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorstow.base.directories import make_folder
from tensorstow.base.errors import OptionError, StoreFormatError, named
from tensorstow.base.new_file import RANDOM, new_stream, sync_directory
from tensorstow.base.regular_file import is_there, read_text, regular_stream
from tensorstow.checkpoint.coded_weights import STATE
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.quantized_weights import linear_weights
from tensorstow.checkpoint.weight_encoders import Encoder, copy_weight
from tensorstow.checkpoint.weight_files import INDEX, ONE, index_of
from tensorstow.io.digest_list import SUFFIX, DigestList
from tensorstow.io.mapped import drop_pages, new_safetensors
from tensorstow.io.safetensors import Entry, lay_out

CONFIG = "config.json"
_QUANTIZED = "quantization_config"
_WEIGHTS = {
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"),
    SUFFIX,
}
"""Endings of files of weights, which are not copied."""
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class QuantizedFolder:
    """What ``quantize_folder`` has written."""

    path: Path
    matrices: int
    """How many weights are codes."""
    source_bytes: int
    """Bytes of the weights before."""
    nbytes: int
    """Bytes of the weights after."""
    other_experts: int
    """How many matrices of experts are not codes."""


def quantize_folder(
    source: Path, target: Path, model: nn.Module, encoder: Encoder, *, experts: bool = False
) -> QuantizedFolder:
    """Write a copy of a model's folder in which weights of linear layers are codes.

    Args:
        source: The folder, with ``config.json`` and safetensors.
        target: The folder to make. It does not exist, or is empty.
        model: The model of its configuration, on the meta device.
        encoder: The codes.
        experts: Whether matrices of experts become codes too, which the model stacks. Then other
            programs may not read the folder.

    Returns:
        What was written.

    Raises:
        OptionError: The source is quantized already, or has no matrix to quantize; with
            ``experts``, it has no matrix of an expert; or the target has files.
        StoreFormatError: The files are not the model's, are cut short, or have a value that is not
            finite.
        DirectoryError: There is no room, or the target cannot be made.
        DamageError: A file of the source has another digest than what was written.
    """
    config = _config_of(source)
    _validate_target(target)
    files = PretrainedFiles(source, model)
    stacked = _matrices_of_experts(model, files)
    if experts and not stacked:
        message = (
            f"{source} was to be quantized with its experts, and its files have no matrix of an"
            f" expert that {type(model).__name__} stacks: the model is dense, or its files have the"
            " stacks, which stay as they are. Quantize it without --experts."
        )
        raise OptionError(message)
    chosen = _chosen(source, files, model, encoder, stacked if experts else frozenset())
    files.verify()
    with _new_folder(target) as folder:
        nbytes = _write_weights(files, folder, chosen, encoder)
        skipped = _kept_layers(model, files, chosen)
        _write_rest(source, folder, {**config, _QUANTIZED: _note_of(encoder, skipped)})
        # In the block: a folder of files that were changed meanwhile gets no name.
        files.validate_unchanged()
    source_bytes = sum(entry.nbytes for entry in files.entries.values())
    return QuantizedFolder(target, len(chosen), source_bytes, nbytes, len(stacked - chosen))


# --- checks ---


def _config_of(source: Path) -> dict[str, Any]:
    """Return the configuration of a model that is not quantized."""
    try:
        config = json.loads(read_text(source / CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        message = f"{source} was to be quantized, and {source / CONFIG} cannot be read: {error}."
        raise OptionError(message) from error
    if not isinstance(config, dict):
        message = f"{source} was to be quantized, and {source / CONFIG} is no JSON object."
        raise OptionError(message)
    if _QUANTIZED in config:
        kind = config[_QUANTIZED]
        kind = kind.get("quant_method") if isinstance(kind, dict) else kind
        message = (
            f"{source} was to be quantized, and is already, by {kind}: codes of codes lose more."
            " Take the original folder."
        )
        raise OptionError(message)
    return config


def _validate_target(target: Path) -> None:
    if is_there(target) and not (target.is_dir() and not any(target.iterdir())):
        message = (
            f"OUT={str(target)!r} exists: nothing is overwritten. Name a new folder, or remove"
            " this one."
        )
        raise OptionError(message)


def _matrices_of_experts(model: nn.Module, files: PretrainedFiles) -> frozenset[str]:
    """Return the files' names of matrices that the model stacks, one or more for each expert."""
    return frozenset(
        piece
        for name, parameter in model.named_parameters()
        if parameter.ndim == 3
        for piece in files.origin([name], parameter).pieces
        if len(files.entries[piece].shape) == 2
    )


def _chosen(
    source: Path,
    files: PretrainedFiles,
    model: nn.Module,
    encoder: Encoder,
    stacked: frozenset[str],
) -> frozenset[str]:
    """Return the files' names of the weights to quantize; check that the files are the model's.

    ``stacked``: further names, beside those of linear layers' weights.
    """
    for name, parameter in model.named_parameters():
        # Raises an error if the files lack the tensor, or have it in another shape.
        files.origin([name], parameter)
    if files.coded:
        message = (
            f"{source} was to be quantized, and {next(iter(files.coded))!r} is already: take the"
            " original folder."
        )
        raise OptionError(message)
    head = _head_of(model) if encoder.name == "nf4" else None
    names = linear_weights(model, files, but=head) | stacked
    chosen = frozenset(n for n in names if files.entries[n].dtype.is_floating_point)
    taken = {part: n for n in chosen for part in encoder.entries(n, files.entries[n]) if part != n}
    clash = next((part for part in taken if part in files.entries), None)
    if clash is not None:
        message = (
            f"{clash!r} is in {files.path_of(clash)}, and {taken[clash]!r} would get a tensor of"
            " that name: the files are quantized already, or of another model."
        )
        raise StoreFormatError(message)
    if not chosen:
        message = (
            f"{source} was to be quantized, and its {type(model).__name__} has no linear layer with"
            " a weight of its own in the files: nothing would become smaller."
        )
        raise OptionError(message)
    return chosen


def _head_of(model: Any) -> nn.Module | None:  # noqa: ANN401  # of transformers, or not
    """Return the layer of the logits, which bitsandbytes keeps as it is."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, nn.Module) else None


def _kept_layers(model: nn.Module, files: PretrainedFiles, chosen: frozenset[str]) -> list[str]:
    """Return the layers that a reader would take for quantized by their class, and are not."""
    layers = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if is_linear and isinstance(weight, torch.Tensor):
            full = f"{name}.weight"
            sources = files.origin([full], weight).sources if files.has(full) else ()
            if chosen.isdisjoint(sources):
                layers.append(name)
    return layers


def _note_of(encoder: Encoder, skipped: list[str]) -> dict[str, Any]:
    """Return what transformers reads of the codes in a configuration."""
    if encoder.name == "nf4":
        return {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": True,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": skipped,
        }
    weights = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": weights, "format": "int-quantized"}
        },
        "ignore": skipped,
    }


# --- writing ---


@contextmanager
def _new_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder next to ``target``, which gets that name when the block has ended."""
    make_folder(target.parent)
    for left in target.parent.glob(f".{target.name}.{RANDOM}"):  # by processes that were killed
        with suppress(OSError):
            # A younger one may be of a process that still writes.
            if left.lstat().st_mtime < time.time() - _DAY:
                shutil.rmtree(left)
    folder = target.with_name(f".{target.name}.{os.urandom(8).hex()}")
    with named("Folder", folder):
        folder.mkdir()
    try:
        yield folder
        # Before the folder has its name, which says that it is complete.
        sync_directory(folder)
        with named("Folder", target):
            folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    sync_directory(target.parent)


def _write_weights(
    files: PretrainedFiles, folder: Path, chosen: Collection[str], encoder: Encoder
) -> int:
    """Write all shards, their index and their digests; return the bytes of the tensors."""
    paths = sorted(files.paths)
    names = {path: path.name if len(paths) > 1 else ONE for path in paths}
    listed = DigestList(folder / (INDEX if len(paths) > 1 else ONE))
    shard_of: dict[str, str] = {}
    total = 0
    for path in paths:
        stored = [name for name in files.entries if files.path_of(name) == path]
        entries: dict[str, Entry] = {}
        for name in stored:
            entry = files.entries[name]
            entries |= encoder.entries(name, entry) if name in chosen else {name: entry}
        # Short ones of odd sizes go last: codes begin at a multiple of 64 where they can.
        entries = dict(sorted(entries.items(), key=lambda item: STATE in item[0]))
        total += sum(entry.nbytes for entry in entries.values())
        shard_of |= dict.fromkeys(entries, names[path])
        with new_safetensors(folder / names[path], lay_out(entries), listed) as copy:
            for name in stored:
                values = files.stored(name)
                write = encoder.write if name in chosen else copy_weight
                write(name, values, copy.put)
                # Else the pages that were read would hold the whole tensor in memory.
                drop_pages(values)
    if len(paths) > 1:
        text = index_of(dict(sorted(shard_of.items())), total)
        listed.write_main(lambda stream: stream.write(text))
    else:
        listed.write()
    return total


def _write_rest(source: Path, folder: Path, config: Mapping[str, Any]) -> None:
    """Copy what is not of weights, durably, and write the configuration."""
    for path in sorted(source.iterdir()):
        is_of_weights = bool(_WEIGHTS.intersection(path.suffixes)) or ".index." in path.name
        if is_of_weights or path.name == CONFIG or not path.is_file():
            continue
        with regular_stream(path) as old, new_stream(folder / path.name) as new:
            shutil.copyfileobj(old, new)
    with new_stream(folder / CONFIG) as stream:
        stream.write(json.dumps(config, indent=2).encode() + b"\n")
