"""Where a unit's first values come from: the module's own tensors, its initialiser, or files.

A unit at a time, so that host memory never holds the whole model of a rank.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn

from tensorstow.base.errors import StoreFormatError
from tensorstow.fsdp.initialising import (
    Init,
    check_initialisable,
    initialise,
    initialise_buffers,
    swap,
)
from tensorstow.fsdp.key_conversion import origins_of
from tensorstow.fsdp.units import Unit

Rows = Callable[[int, int], torch.Tensor]
"""Rows of a parameter from one to another, on the CPU."""
_INDEX = "model.safetensors.index.json"


class Files:
    """The tensors of safetensors files, by a model's names: read in slices."""

    def __init__(self, path: str | os.PathLike[str], model: nn.Module | None = None) -> None:
        """Find names in a file, or in all of a directory; raises StoreFormatError for none.

        ``model``: whose names they are asked by, before it is sharded; None: by those of the files.
        """
        self._of: dict[str, Path] = {}
        shapes: dict[str, Sequence[int]] = {}
        for file in _files(Path(path)):
            with _opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118  # no mapping
                    self._of[name] = file
                    shapes[name] = opened.get_slice(name).get_shape()
        self._origins = origins_of(model, shapes)
        self._path = path

    def has(self, name: str) -> bool:
        """Return whether there is a tensor called ``name``."""
        return name in self._origins

    def rows(self, names: list[str], like: torch.Tensor) -> Rows:
        """Return a reader of the tensor that has one of ``names``, in the dtype of ``like``.

        Raises StoreFormatError where there is none, or it has another shape.
        """
        name = next((n for n in names if n in self._origins), None)
        if name is None:
            near = get_close_matches(names[0], self._origins, 1)
            told = f"the nearest is {near[0]!r}" if near else "nor any like it"
            message = (
                f"{self._path} has no tensor {names[0]!r}, {told}: it is of another model, or of a"
                " part of this one."
            )
            raise StoreFormatError(message)
        origin = self._origins[name]
        if origin.shape != tuple(like.shape):
            message = (
                f"{name!r} in {self._path} is {origin.shape} and the model's is"
                f" {tuple(like.shape)}."
            )
            raise StoreFormatError(message)

        def read(start: int, stop: int) -> torch.Tensor:
            if origin.make is not None:
                made = origin.make(self._whole)
                return (made[start:stop] if like.ndim else made).to(like.dtype)
            source = origin.sources[0]
            with _opened(self._of[source]) as file:
                part: torch.Tensor = (
                    file.get_slice(source)[start:stop] if like.ndim else file.get_tensor(source)
                )
                return part.to(like.dtype)

        return read

    def _whole(self, source: str) -> torch.Tensor:
        with _opened(self._of[source]) as file:
            whole: torch.Tensor = file.get_tensor(source)
            return whole


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / _INDEX
    if index.is_file():
        return _indexed(index)
    found = sorted(path.glob("*.safetensors"))
    if not found:
        message = f"{path} is neither a safetensors file nor a directory that has some."
        raise StoreFormatError(message)
    return found


def _indexed(index: Path) -> list[Path]:
    """Return the files that an index names, which lie beside it."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        message = (
            f"{index} was to say which files the weights are in, and cannot be read ({error!r})."
            " Take the original."
        )
        raise StoreFormatError(message) from error
    strange = [name for name in names if not isinstance(name, str) or Path(name).name != name]
    if strange:
        message = f"{index} names {strange[0]!r}, which is no file beside it. Take the original."
        raise StoreFormatError(message)
    return [index.with_name(name) for name in names]


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Open a safetensors file; raise StoreFormatError where it is none, or not there."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (OSError, SafetensorError, ValueError) as error:
        message = (
            f"{file} was to be read as safetensors: {error}. It is another kind of file, or its"
            " copy was cut short: take the original."
        )
        raise StoreFormatError(message) from error


def of_tensor(whole: torch.Tensor) -> Rows:
    """Return the rows of a tensor that is there; all of it where it is a scalar."""
    return lambda start, stop: (whole.detach()[start:stop] if whole.ndim else whole.detach()).cpu()


class Sources:
    """First values of parameters and buffers, the same on every rank."""

    def __init__(
        self,
        weights: str | os.PathLike[str] | None,
        init: Init | None,
        group: dist.ProcessGroup | None,
        model: nn.Module | None = None,
    ) -> None:
        """Read ``weights`` (safetensors) where given; ``group``: ranks that are to agree.

        ``model``: what they are for, where its files may have other names than it has.
        """
        self._files = None if weights is None else Files(weights, model)
        self._init = init
        self._group = group

    def check(self, units: Iterable[Unit], aliases: Mapping[str, list[str]]) -> None:
        """Raise StoreFormatError or OptionError for parameters that nothing gives values."""
        for unit in units:
            if self._files is not None:
                self._of_files(self._files, unit, aliases)
            elif self._init is None:
                check_initialisable(unit)

    @staticmethod
    def _of_files(files: Files, unit: Unit, aliases: Mapping[str, list[str]]) -> dict[str, Rows]:
        return {n: files.rows([n, *aliases.get(n, [])], p) for n, p in unit.parameters.items()}

    def rows(self, unit: Unit, aliases: Mapping[str, list[str]]) -> dict[str, Rows]:
        """Return readers of the unit's parameters, by name.

        From the files, where there are any; else the first rank's values go to all.
        """
        if self._files is not None:
            return self._of_files(self._files, unit, aliases)
        if self._group is not None:
            for parameter in unit.parameters.values():
                if not parameter.is_meta:
                    self._agree(parameter.detach())
        if any(p.is_meta for p in unit.parameters.values()):
            with self._same_randomness():
                initialise(unit, self._init)
        return {n: of_tensor(p) for n, p in unit.parameters.items()}

    def fill(self, units: Iterable[Unit], aliases: Mapping[str, list[str]]) -> None:
        """Give the values to parameters that stay whole in host memory."""
        for unit in units:
            for name, read in self.rows(unit, aliases).items():
                parameter = unit.parameters[name]
                if self._files is None:
                    continue
                values = read(0, parameter.shape[0] if parameter.ndim else 0)
                if parameter.is_meta:
                    swap(parameter, values)
                else:
                    parameter.detach().copy_(values)

    def buffers(self, model: nn.Module) -> None:
        """Give buffers their values: from the files, or the first rank's.

        Those on the meta device that are in no file are initialised; raises OptionError for one
        that then still has no values.
        """
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                if self._files is not None and self._files.has(full):
                    stop = buffer.shape[0] if buffer.ndim else 0
                    values = self._files.rows([full], buffer)(0, stop)
                    module._buffers[name] = values.to("cpu" if buffer.is_meta else buffer.device)  # noqa: SLF001
        with self._same_randomness():
            for prefix, module in model.named_modules():
                if any(b.is_meta for b in module.buffers(recurse=False)):
                    initialise_buffers(module, prefix, self._init)
        if self._group is not None:
            for buffer in model.buffers():
                self._agree(buffer)

    def _agree(self, tensor: torch.Tensor) -> None:
        values = tensor.detach().cpu().contiguous()
        dist.broadcast(values, group_src=0, group=self._group)
        tensor.detach().copy_(values)

    @contextmanager
    def _same_randomness(self) -> Iterator[None]:
        """Give every rank the first one's random numbers inside, and its own again behind."""
        if self._group is None:
            yield
            return
        state = torch.get_rng_state()
        dist.broadcast(state, group_src=0, group=self._group)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            yield
