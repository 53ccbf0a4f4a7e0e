"""``quantize_to_int8``: a copy of a model's files with the weights of its linear layers in int8."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from tensorstow.base.directories import make_folder
from tensorstow.base.errors import DamageError, OptionError, named
from tensorstow.base.keywords import names_keywords
from tensorstow.checkpoint.coded_weights import SCALE
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.weight_encoders import ENCODERS, copy_weight
from tensorstow.io.digest_list import DigestList, verify
from tensorstow.io.mapped import new_safetensors
from tensorstow.io.safetensors import METADATA, lay_out, read_table

_FILE = "model.safetensors"
_SOURCE = "tensorstow.int8_of"
"""The metadata key for a digest of the source files."""
_ENCODER = ENCODERS["int8"]


@names_keywords
def quantize_to_int8(
    model: nn.Module, weights: str | os.PathLike[str], into: str | os.PathLike[str]
) -> Path:
    """Write a copy of a model's files in which weights of linear layers are int8, if there is none.

    It is inexact: a weight differs from the original by at most half of its row's scale. A row's
    scale is its largest magnitude divided by 127. Weights that another kind of layer shares (a tied
    embedding), and all other tensors, are copied as they are.

    Args:
        model: The model, which may be on the meta device: its linear layers count.
        weights: Its safetensors, a file or a directory.
        into: The directory of the copy, made if there is none. An existing copy of the same files
            is read once to verify its digest, and stays as it is; one of other files, or without a
            list of digests, is replaced, durably and as a whole.

    Returns:
        The directory, for ``stow(model, None, weights=...)``.

    Raises:
        StoreFormatError: The files are not the model's, or a weight is not finite.
        OptionError: Something else is in the directory.
        DirectoryError: There is no room, or the directory cannot be made.
        DamageError: A file of the weights, or the copy, has another digest than what was written.
    """
    files = PretrainedFiles(weights, model)
    folder = Path(into)
    target = folder / _FILE
    foreign_files = sorted({*folder.glob("*.safetensors"), *folder.glob("*.index.json")} - {target})
    if foreign_files:
        raise _refuse_other(foreign_files[0])
    chosen = {
        name
        for name in linear_weights(model, files)
        if files.entries[name].dtype.is_floating_point and name + SCALE not in files.entries
    }
    source, listed = _describe(files.paths, chosen), DigestList(target)
    with _locked(folder):  # the ranks of a machine may all ask for it
        if target.exists():
            target_source = read_table(target).metadata.get(_SOURCE)
            if target_source is None:
                raise _refuse_other(target)
            if target_source == source and listed.path.exists():
                _verify_copy(listed)
                return folder
        files.verify()
        entries = dict(files.entries)
        for name in sorted(chosen):
            entries |= _ENCODER.entries(name, entries[name])
        table = lay_out(entries, {**METADATA, _SOURCE: source})
        with new_safetensors(target, table, listed) as copy:
            for name in files.entries:
                write = _ENCODER.write if name in chosen else copy_weight
                write(name, files.stored(name), copy.put)
            # In the block, at whose end the copy replaces what was there.
            files.validate_unchanged()
        listed.write()
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a directory if there is none, and keep other processes from writing a copy there."""
    make_folder(folder)
    with named("A directory for a copy in int8,", folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # The lock ends with the descriptor.
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _verify_copy(listed: DigestList) -> None:
    """Raise DamageError unless an existing copy is what was written."""
    try:
        verify(listed.main)
    except DamageError as error:
        message = (
            f"{listed.main}, a copy in int8, or its list of digests is not what was written: it was"
            f" damaged, or changed by another program. Remove it and {listed.path}, and call"
            " quantize_to_int8() again."
        )
        raise DamageError(message) from error


def _refuse_other(path: Path) -> OptionError:
    message = (
        f"{path} is in the directory of a copy in int8, and quantize_to_int8() has not made it:"
        " name a directory for the copy alone."
    )
    return OptionError(message)


def linear_weights(
    model: nn.Module, files: PretrainedFiles, but: nn.Module | None = None
) -> set[str]:
    """Return the files' names of weights that linear layers alone have, without one layer's."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    other: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():  # noqa: SLF001  # tied ones too
            if parameter is None:
                continue
            if not (isinstance(module, nn.Linear) and name == "weight") or module is but:
                other.add(id(parameter))
            parameters[id(parameter)] = parameter
            names.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
    origins = [files.origin(names[key], p) for key, p in parameters.items() if key not in other]
    return {o.sources[0] for o in origins if o.make is None and o.coded is None}


def _describe(paths: Iterable[Path], chosen: set[str]) -> str:
    """Return a digest of the files' facts and of the names that are quantized."""
    seen = [(path.name, path.stat()) for path in sorted(paths)]
    facts = [(name, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in seen]
    return hashlib.sha256(json.dumps([facts, sorted(chosen)]).encode()).hexdigest()
