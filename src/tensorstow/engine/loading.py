"""Where a unit's first values come from: the module's own tensors, its initialiser, or files.

A unit at a time, so that host memory never holds the whole model of a rank.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from tensorstow.base.errors import OptionError, StoreFormatError
from tensorstow.engine.units import Unit

Rows = Callable[[int, int], torch.Tensor]
"""Rows of a parameter from one to another, on the CPU."""
_INDEX = "model.safetensors.index.json"


class Files:
    """The tensors of safetensors files, by name: read in slices."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Find names in a file, or in all of a directory; raises StoreFormatError for none."""
        self._of: dict[str, Path] = {}
        for file in _files(Path(path)):
            with safe_open(file, framework="pt") as opened:
                self._of |= dict.fromkeys(opened.keys(), file)
        self._path = path

    def rows(self, names: list[str], like: torch.Tensor) -> Rows:
        """Return a reader of the tensor that has one of ``names``, in the dtype of ``like``.

        Raises StoreFormatError where there is none, or it has another shape.
        """
        name = next((n for n in names if n in self._of), None)
        if name is None:
            message = f"{self._path} has no tensor {names[0]!r}: it is of another model."
            raise StoreFormatError(message)
        with safe_open(self._of[name], framework="pt") as file:
            shape = tuple(file.get_slice(name).get_shape())
        if shape != tuple(like.shape):
            message = f"{name!r} in {self._path} is {shape} and the model's is {tuple(like.shape)}."
            raise StoreFormatError(message)

        def read(start: int, stop: int) -> torch.Tensor:
            with safe_open(self._of[name], framework="pt") as file:
                part: torch.Tensor = (
                    file.get_slice(name)[start:stop] if like.ndim else file.get_tensor(name)
                )
                return part.to(like.dtype)

        return read


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / _INDEX
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        return [path / name for name in sorted(names)]
    found = sorted(path.glob("*.safetensors"))
    if not found:
        message = f"{path} is neither a safetensors file nor a directory that has some."
        raise StoreFormatError(message)
    return found


def of_tensor(whole: torch.Tensor) -> Rows:
    """Return the rows of a tensor that is there; all of it where it is a scalar."""
    return lambda start, stop: (whole.detach()[start:stop] if whole.ndim else whole.detach()).cpu()


def is_empty(unit: Unit) -> bool:
    """Return whether any parameter of the unit is on the meta device."""
    return any(p.is_meta for p in unit.parameters.values())


def initialise(unit: Unit, init: Callable[[nn.Module], None] | None) -> None:
    """Give memory on the CPU to the unit's modules that are on the meta device, and first values.

    ``init`` is called with each such module; None: its ``reset_parameters``. Parameters keep their
    identity. Raises OptionError for a module that has none.
    """
    mine = {id(p) for p in unit.parameters.values()}
    for name, module in unit.module.named_modules():
        own = list(module.parameters(recurse=False))
        if not any(id(p) in mine and p.is_meta for p in own):
            continue
        for parameter in own:
            if parameter.is_meta:
                empty = torch.empty_like(parameter, device="cpu")
                _swap(parameter, empty)
        _first_values(module, name or type(module).__name__, init)


def _swap(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let ``parameter``, wherever it is known, be ``values``."""
    swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
    swap(parameter, nn.Parameter(values, parameter.requires_grad))


def _first_values(module: nn.Module, name: str, init: Callable[[nn.Module], None] | None) -> None:
    own = getattr(module, "reset_parameters", None)
    if init is None and own is None:
        message = (
            f"{name} ({type(module).__name__}) is on the meta device and has no"
            " reset_parameters(): pass init=, a function that gives a module its first values, or"
            " weights=, safetensors to load."
        )
        raise OptionError(message)
    with torch.no_grad():
        if init is not None:
            init(module)
        elif own is not None:
            own()


class Sources:
    """First values of parameters and buffers, the same on every rank."""

    def __init__(
        self,
        weights: str | os.PathLike[str] | None,
        init: Callable[[nn.Module], None] | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Read ``weights`` (safetensors) where given; ``group``: ranks that are to agree."""
        self._files = None if weights is None else Files(weights)
        self._init = init
        self._group = group

    def rows(self, unit: Unit, aliases: Mapping[str, list[str]]) -> dict[str, Rows]:
        """Return readers of the unit's parameters, by name.

        From the files, where there are any; else the first rank's values go to all.
        """
        if self._files is not None:
            files = self._files
            return {n: files.rows([n, *aliases.get(n, [])], p) for n, p in unit.parameters.items()}
        if is_empty(unit):
            with self._same_randomness():
                initialise(unit, self._init)
        elif self._group is not None:
            for parameter in unit.parameters.values():
                self._agree(parameter.detach())
        return {n: of_tensor(p) for n, p in unit.parameters.items()}

    def fill(self, units: Iterable[Unit], aliases: Mapping[str, list[str]]) -> None:
        """Give the values to parameters that stay whole in host memory."""
        for unit in units:
            for name, read in self.rows(unit, aliases).items():
                parameter = unit.parameters[name]
                values = read(0, parameter.shape[0] if parameter.ndim else 0)
                if parameter.is_meta:
                    _swap(parameter, values)
                elif self._files is not None:
                    parameter.detach().copy_(values)

    def buffers(self, model: nn.Module) -> None:
        """Let buffers be the first rank's; raises OptionError for one without values."""
        for name, buffer in model.named_buffers():
            if buffer.is_meta:
                message = (
                    f"The buffer {name} is on the meta device: give it values before stow(), as"
                    " its module's constructor would."
                )
                raise OptionError(message)
            if self._group is not None:
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
