"""Pretrained weights: safetensors files, read by the names and in the shapes of a model.

[Note: Key conversion] transformers (from version 5) computes with other tensors than its
checkpoints have: experts as one tensor, vision towers under other names. Its own conversions map
tensors of a file to those of the model; they are applied tensor by tensor, so that memory is that
of one tensor and its sources. For other models the names in the files are the model's.

[Note: Coded weights] Codes of ``coded_weights`` are read as the values that they stand for.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorstow.base.core_share import LocalRanks
from tensorstow.base.directories import expand_path, path_inside
from tensorstow.base.errors import DamageError, DirectoryError, StoreFormatError, named
from tensorstow.base.regular_file import check_regular, is_there, read_text
from tensorstow.checkpoint.adapters import Adapters
from tensorstow.checkpoint.coded_weights import (
    SCALE,
    CodedStack,
    CodedWeight,
    coded_weights,
    entry_in_file,
)
from tensorstow.checkpoint.weight_files import INDEX, SeenFile
from tensorstow.io.digest_list import verify_each
from tensorstow.io.mapped import Mapped
from tensorstow.io.safetensors import NAME_OF, Entry, read_table

RowReader = Callable[[int, int], torch.Tensor]
"""Returns rows of a parameter from the first to before the second number, on the CPU."""
Read = Callable[[str], torch.Tensor]
"""Returns a tensor of the files by its name in the files."""
_OTHER_SCALE = "_scale_inv"
"""Ends the name of scales of blocks of a matrix, which are not read here."""


class PretrainedFiles:
    """The tensors of safetensors files, by a model's names: read in slices."""

    def __init__(self, path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
        """Read the names and shapes in a file, or in all files of a directory.

        The names are those of the unsharded ``model``; None: those in the files. Raises
        StoreFormatError if there is no file, or one cannot be read.
        """
        self.entries: dict[str, Entry] = {}
        """The tensors by their names in the files."""
        self._of: dict[str, Path] = {}
        self._seen: list[SeenFile] = []
        files = _files_of(expand_path(path))
        index = files[0].with_name(INDEX)
        self._mains: dict[Path, Sequence[Path]] = {
            file: (file, file.with_name(INDEX)) for file in files
        }
        """The files that are verified, and with which others each may be listed."""
        if Path(os.path.realpath(path)).is_dir() and is_there(index):
            self._mains[index] = (index,)
        for file in files:
            with _readable(file):
                check_regular(file)
                self._seen.append(SeenFile(file))
                entries = read_table(file).entries
            self._of |= dict.fromkeys(entries, file)
            self.entries |= entries
        self.path = path
        self.coded = coded_weights(self.entries, self.stored)
        """The weights that are stored as codes, by the names of their codes in the files."""
        shapes = {name: entry.shape for name, entry in self.entries.items()}
        shapes |= {name: weight.shape for name, weight in self.coded.items()}
        self._origins = {n: self._coded_as(o) for n, o in origins_of(model, shapes).items()}

    def _coded_as(self, origin: "Origin") -> "Origin":
        """Return an origin with its codes, if it is stored so."""
        coded = [self.coded[source] for source in origin.sources if source in self.coded]
        if not coded:
            return origin
        if origin.make is None:
            return replace(origin, coded=coded[0])
        pieces = [self.coded[piece] for piece in origin.pieces if piece in self.coded]
        is_stack = len(pieces) == len(origin.sources) and len(pieces) % origin.shape[0] == 0
        stack = CodedStack(origin.shape, pieces) if is_stack else None
        return replace(origin, coded=stack, pieces=())  # the bytes of codes are no values

    def validate_unchanged(self) -> None:
        """Raise DamageError if a file was changed or replaced since; call it after the last read.

        What a reader returns may be the file's mapped memory: copy it before.
        """
        for seen in self._seen:
            seen.validate_unchanged()

    def verify(self, ranks: LocalRanks | None = None) -> None:
        """Raise DamageError unless the files have their digests; each is read once for that.

        Files without digests are not read; the first one in this process is logged. ``ranks``: the
        ranks of this machine, if all of them make this call: each reads some files.
        """
        verify_each(self._mains, ranks)

    def has(self, name: str) -> bool:
        """Return whether the files have a tensor called ``name``."""
        return name in self._origins

    def reader(self, names: list[str], like: torch.Tensor) -> RowReader:
        """Return a reader of a tensor's rows in the dtype of ``like``; otherwise as ``origin``."""
        origin = self.origin(names, like)

        def read(start: int, stop: int) -> torch.Tensor:
            make, coded = origin.make, origin.coded
            # A parameter of whole numbers takes the codes as they are.
            if coded is not None and like.is_floating_point():
                return self._decoded(coded, start, stop, like.dtype)
            whole = self.stored(origin.sources[0]) if make is None else make(self._values)
            return (whole[start:stop] if like.ndim else whole).to(like.dtype)

        return read

    def parts(self, coded: CodedWeight, start: int, stop: int) -> list[tuple[Path, Entry]]:
        """Return what is read of the files for rows of a coded weight, with offsets in them."""
        return [
            (self._of[part.source], entry_in_file(part, self.entries[part.source]))
            for part in coded.parts(start, stop)
        ]

    def read_parts(self, coded: CodedWeight, start: int, stop: int) -> list[torch.Tensor]:
        """Return the tensors that rows of a coded weight are computed from, over mappings."""
        return [_mapped(path, entry) for path, entry in self.parts(coded, start, stop)]

    def _decoded(
        self, coded: CodedWeight, start: int, stop: int, dtype: torch.dtype
    ) -> torch.Tensor:
        values = torch.empty((stop - start, *coded.shape[1:]), dtype=dtype, device="cpu")
        coded.decode(self.read_parts(coded, start, stop), start, stop, values)
        return values

    def _values(self, source: str) -> torch.Tensor:
        """Return a tensor of the files; the values of a coded one, in fp32."""
        coded = self.coded.get(source)
        if coded is None:
            return self.stored(source)
        return self._decoded(coded, 0, coded.shape[0], torch.float32)

    def origin(self, names: Sequence[str], like: torch.Tensor) -> "Origin":
        """Return the tensors of the files that a tensor is made of.

        The first of ``names`` that the files have is taken. Raises StoreFormatError if they have
        none, or it has another shape than ``like``.
        """
        name = next((n for n in names if n in self._origins), None)
        if name is None:
            near = get_close_matches(names[0], self._origins, 1)
            hint = f"the nearest is {near[0]!r}" if near else "nor any like it"
            message = (
                f"{self.path} has no tensor {names[0]!r}, {hint}: it is of another model, or of a"
                " part of this one."
            )
            raise StoreFormatError(message)
        origin = self._origins[name]
        if origin.shape != tuple(like.shape):
            message = (
                f"{name!r} in {self.path} is {origin.shape} and the model's is {tuple(like.shape)}."
            )
            raise StoreFormatError(message)
        if like.is_floating_point():
            self._validate_floating(origin)
        return origin

    @property
    def paths(self) -> set[Path]:
        """Return the files that have tensors."""
        return set(self._of.values())

    def path_of(self, source: str) -> Path:
        """Return the file that has the tensor called ``source``."""
        return self._of[source]

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the tensors of the files that no tensor called one of ``names`` is made of."""
        used = [self._origins[name] for name in names if name in self._origins]
        taken = {source for origin in used for source in origin.sources}
        codes = [self.coded[source].sources for source in taken if source in self.coded]
        return sorted(set(self._of) - taken.union(*codes))

    def _validate_floating(self, origin: "Origin") -> None:
        """Raise StoreFormatError if a tensor is of codes that are not read here."""
        for source in origin.sources:
            dtype = NAME_OF[self.entries[source].dtype]
            has_scale = any(source + end in self.entries for end in (SCALE, _OTHER_SCALE))
            is_coded = dtype[0] in "IU" or (dtype.startswith("F8") and has_scale)
            if source in self.coded or not is_coded:
                continue
            scales = " with other scales than one for each row" if has_scale else ""
            message = (
                f"{source!r} in {self.path} is of {dtype}{scales}, and the model's is of floating"
                " point: it is quantized in a way that is not read here. Take the original, and"
                " `tensorstow quantize` that."
            )
            raise StoreFormatError(message)

    def stored(self, source: str) -> torch.Tensor:
        """Return a tensor of the files, over a mapping of its own: it reads no byte yet."""
        return _mapped(self._of[source], self.entries[source])


def _mapped(file: Path, entry: Entry) -> torch.Tensor:
    with _readable(file):
        return Mapped.read(file).tensor(entry.offset, entry.shape, entry.dtype)


def _files_of(path: Path) -> list[Path]:
    index = path / INDEX
    with named("Weights in", path):
        if is_there(path) and not path.is_dir():
            return [path]
        has_index = is_there(index)
        files = sorted(path.glob("*.safetensors"))
    if has_index:
        return _files_of_index(index)
    if not files:
        message = f"{path} is neither a safetensors file nor a directory that has some."
        raise StoreFormatError(message)
    return files


def _files_of_index(index: Path) -> list[Path]:
    """Return the files that an index names, which are in its directory."""
    try:
        names = sorted(set(json.loads(read_text(index))["weight_map"].values()))
    except DirectoryError:
        raise
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        message = (
            f"{index}, which lists the files of the weights, cannot be read ({error!r})."
            " Take the original."
        )
        raise StoreFormatError(message) from error
    return [path_inside(index.parent, name, index, links=True) for name in names]


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise StoreFormatError if a file is no safetensors or does not exist."""
    try:
        yield
    except (DamageError, DirectoryError):
        raise
    except (OSError, ValueError) as error:
        message = (
            f"{file} cannot be read as safetensors: {error}. It is another kind of file, or an"
            " incomplete copy: use the original."
        )
        raise StoreFormatError(message) from error


_JOINING = {"MergeModulelist", "Concatenate"}
"""Operations of transformers that move no element but with its neighbours."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensors of files that one tensor of a model is made of."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    """Names in the files."""
    make: Callable[[Read], torch.Tensor] | None = None
    """None: it is the one source."""
    coded: CodedWeight | None = None
    """The one source, or all that are joined, if they are stored as codes."""
    pieces: tuple[str, ...] = ()
    """The sources, if their bytes one after the other are those of the tensor; else empty."""


def is_of_transformers(model: nn.Module) -> bool:
    """Return whether ``model`` is a PreTrainedModel; transformers is not imported for that."""
    module = sys.modules.get("transformers.modeling_utils")
    return module is not None and isinstance(model, module.PreTrainedModel)


def origins_of(model: nn.Module | None, shapes: Mapping[str, Sequence[int]]) -> dict[str, Origin]:
    """Map each tensor of the model to the tensors of the files that it is made of.

    Other tensors of the files, whose ``shapes`` are by name, are under their own names.
    """
    origins = {name: Origin(tuple(shape), (name,)) for name, shape in shapes.items()}
    if model is None:
        return origins
    adapters = Adapters(model)
    names = adapters.base_names
    origins |= _converted_origins(adapters.base, set(names.values()), shapes)
    below = {name: base for name, base in names.items() if name not in shapes and base in origins}
    return origins | {name: origins[base] for name, base in below.items()}


def _converted_origins(
    model: nn.Module, names: Collection[str], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Origin]:
    """Return the origins of the tensors of ``names`` that transformers renames or converts."""
    if not is_of_transformers(model):
        return {}
    try:
        from transformers import conversion_mapping, core_model_loading  # noqa: PLC0415
    except ImportError:  # before version 5, whose models have what their files have
        return {}
    typed_model: Any = model
    conversions = conversion_mapping.get_model_conversion_mapping(typed_model)
    return _convert_keys(model, dict.fromkeys(names, True), shapes, conversions, core_model_loading)


def _convert_keys(
    model: Any,  # noqa: ANN401  # another library's
    names: Mapping[str, object],
    shapes: Mapping[str, Sequence[int]],
    conversions: Iterable[Any],
    loading: Any,  # noqa: ANN401  # transformers.core_model_loading
) -> dict[str, Origin]:
    """Return the origins of renamed and converted tensors, as in ``from_pretrained``."""
    renamings = [c for c in conversions if isinstance(c, loading.WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, loading.WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    origins: dict[str, Origin] = {}
    parts: dict[str, list[tuple[str, str]]] = {}
    # In transformers' order, in which converters join tensors, such as experts.
    for name in sorted(shapes, key=loading.dot_natural_key):
        prefix_and_names = (model.base_model_prefix, names)
        target, pattern = loading.rename_source_key(name, renamings, converters, *prefix_and_names)
        # The model has this tensor by its name in the file, and none by the converted one.
        if target not in names and name in names:
            target, pattern = loading.rename_source_key(name, [], [], *prefix_and_names)
        if pattern is not None:
            parts.setdefault(target, []).append((name, pattern))
        elif target in names:
            origins.setdefault(target, Origin(tuple(shapes[name]), (name,)))
    for target, sources in parts.items():
        origins |= _origins_by(model, target, sources, by_pattern[sources[0][1]], shapes)
    return origins


def _origins_by(
    model: Any,  # noqa: ANN401
    target: str,
    sources: Sequence[tuple[str, str]],
    converter: Any,  # noqa: ANN401  # a WeightConverter
    shapes: Mapping[str, Sequence[int]],
) -> dict[str, Origin]:
    """Return the origins of the tensors that ``converter`` makes of ``sources``."""

    def convert(read: Read) -> dict[str, torch.Tensor]:
        # A converter collects the tensors that are added to it, so each conversion needs its own.
        fresh = deepcopy(converter)
        for name, pattern in sources:
            fresh.add_tensor(target, name, pattern, read(name))
        tensors = fresh.convert(target, model=model, config=model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in tensors.items()}

    def maker(name: str) -> Callable[[Read], torch.Tensor]:
        return lambda read: convert(read)[name]

    names = tuple(name for name, _ in sources)
    try:
        # On the meta device: only the shapes of the results are wanted.
        alike = convert(lambda name: torch.empty(tuple(shapes[name]), device="meta"))
    except (RuntimeError, ValueError, IndexError) as error:
        shape_of = {name: tuple(shapes[name]) for name in names}
        usual, _ = Counter(shape_of.values()).most_common(1)[0]
        odd = next((name for name in names if shape_of[name] != usual), names[0])
        message = (
            f"{target!r} is made of {len(names)} tensors of the files, such as {odd!r} of shape"
            f" {shape_of[odd]}, and they do not fit together ({str(error).strip()}): the files are"
            " damaged, or of another model. Take the original."
        )
        raise StoreFormatError(message) from error
    pieces: tuple[str, ...] = ()
    if {type(operation).__name__ for operation in converter.operations} <= _JOINING:
        pieces = _pieces_of(names, shapes, convert)
    return {
        n: Origin(tuple(t.shape), names, maker(n), pieces=pieces if len(alike) == 1 else ())
        for n, t in alike.items()
    }


def _pieces_of(
    names: Sequence[str],
    shapes: Mapping[str, Sequence[int]],
    convert: Callable[[Read], Mapping[str, torch.Tensor]],
) -> tuple[str, ...]:
    """Return ``names`` in the order in which a conversion joins their bytes; empty: it does not.

    It is asked to join tensors of two elements in each dimension, which have numbers of their own.
    """
    small: dict[str, torch.Tensor] = {}
    for name in names:
        shape = [2] * len(shapes[name])
        start = sum(tensor.numel() for tensor in small.values())
        small[name] = torch.arange(start, start + 2 ** len(shape)).view(shape)
    (joined,) = convert(small.__getitem__).values()
    first = {int(tensor.flatten()[0]): name for name, tensor in small.items()}
    order = tuple(first[n] for n in joined.flatten().tolist() if n in first)
    in_order = torch.cat([small[name].flatten() for name in order])
    return order if torch.equal(in_order, joined.flatten()) else ()
