"""First values of parameters and buffers: the model's own, an initializer's, or from files.

A unit at a time, so that host memory never holds the whole model of a rank.

[Note: Initializers] A module's ``reset_parameters`` initializes the module's own tensors. A user's
``init`` is called as by ``Module.apply``: children first, and also for modules without tensors of
their own if everything below them is in the unit (some rescale their children's values). A tied
parameter keeps the value from its first module. Buffers are filled with NaN, or the least number,
before: those that still hold it afterwards were not initialized.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.pretrained import PretrainedFiles, RowReader
from tensorstow.fsdp.units import Unit

Init = Callable[[nn.Module], object]
"""Gives one module its first values."""


def reader_of(whole: torch.Tensor) -> RowReader:
    """Return a reader of the rows of ``whole``; of all of it where it is a scalar."""
    return lambda start, stop: (whole.detach()[start:stop] if whole.ndim else whole.detach()).cpu()


class InitialValues:
    """First values of parameters and buffers, the same on every rank."""

    def __init__(
        self,
        weights: str | os.PathLike[str] | None,
        init: Init | None,
        group: dist.ProcessGroup | None,
        model: nn.Module | None = None,
    ) -> None:
        """Set the source of the values.

        Args:
            weights: Safetensors, a file or a directory; None: the model's own values.
            init: Initializes one module; None: the module's ``reset_parameters``.
            group: Ranks that get the same values; None: there is one.
            model: The model of ``weights``, if its files may use other names.

        Raises:
            StoreFormatError: ``weights`` cannot be read.
        """
        self.files = None if weights is None else PretrainedFiles(weights, model)
        """Where the values come from; None: from the model or its initializers."""
        self._init = init
        self._group = group

    def check(self, units: Iterable[Unit], aliases: Mapping[str, list[str]]) -> None:
        """Check that every parameter will have values, before anything is placed.

        Args:
            units: All units of the model.
            aliases: Further names of tied parameters, by their first.

        Raises:
            StoreFormatError: The files lack a parameter, or have it in another shape.
            OptionError: A parameter on the meta device has no initializer.
        """
        for unit in units:
            if self.files is not None:
                self._readers_of_files(self.files, unit, aliases)
            elif self._init is None:
                validate_initializable(unit)

    @staticmethod
    def _readers_of_files(
        files: PretrainedFiles, unit: Unit, aliases: Mapping[str, list[str]]
    ) -> dict[str, RowReader]:
        return {n: files.reader([n, *aliases.get(n, [])], p) for n, p in unit.parameters.items()}

    def readers(self, unit: Unit, aliases: Mapping[str, list[str]]) -> dict[str, RowReader]:
        """Return readers of the unit's parameters, by name. Collective, without files.

        They read from the files, where there are any; else the first rank's values go to all.

        Args:
            unit: The unit; parameters on the meta device are initialized.
            aliases: Further names of tied parameters, by their first.
        """
        if self.files is not None:
            return self._readers_of_files(self.files, unit, aliases)
        if self._group is not None:
            for parameter in unit.parameters.values():
                if not parameter.is_meta:
                    self._broadcast(parameter.detach())
        if any(p.is_meta for p in unit.parameters.values()):
            with self._same_random_state():
                initialize_unit(unit, self._init)
        return {n: reader_of(p) for n, p in unit.parameters.items()}

    def fill(self, units: Iterable[Unit], aliases: Mapping[str, list[str]]) -> None:
        """Fill parameters that stay unsharded. Collective, without files.

        Args:
            units: The units; parameters on the meta device get memory on the CPU.
            aliases: Further names of tied parameters, by their first.
        """
        for unit in units:
            for name, read in self.readers(unit, aliases).items():
                parameter = unit.parameters[name]
                if self.files is None:
                    continue
                values = read(0, parameter.shape[0] if parameter.ndim else 0)
                if parameter.is_meta:
                    swap_parameter(parameter, values)
                else:
                    parameter.detach().copy_(values)

    def buffers(self, model: nn.Module) -> None:
        """Fill buffers: from the files, or with the first rank's values. Collective.

        Args:
            model: Its buffers on the meta device that are in no file are initialized.

        Raises:
            OptionError: One then still has no values.
        """
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                if self.files is not None and self.files.has(full):
                    stop = buffer.shape[0] if buffer.ndim else 0
                    values = self.files.reader([full], buffer)(0, stop)
                    module._buffers[name] = values.to("cpu" if buffer.is_meta else buffer.device)  # noqa: SLF001
        with self._same_random_state():
            for prefix, module in model.named_modules():
                if any(b.is_meta for b in module.buffers(recurse=False)):
                    initialize_buffers(module, prefix, self._init)
        if self._group is not None:
            for buffer in model.buffers():
                self._broadcast(buffer)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        values = tensor.detach().cpu().contiguous()
        dist.broadcast(values, group_src=0, group=self._group)
        tensor.detach().copy_(values)

    @contextmanager
    def _same_random_state(self) -> Iterator[None]:
        """Use the first rank's random state on every rank inside the block, and restore it."""
        if self._group is None:
            yield
            return
        state = torch.get_rng_state()
        dist.broadcast(state, group_src=0, group=self._group)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            yield


def initialize_unit(unit: Unit, init: Init | None) -> None:
    """Allocate and initialize the unit's modules that are on the meta device, on the CPU.

    Args:
        unit: The unit; its parameters keep their identity.
        init: Called with each such module; None: its ``reset_parameters``.

    Raises:
        OptionError: A module has no initializer, or a buffer got no values.
    """
    mine = {id(p) for p in unit.parameters.values()}
    fresh = {id(p) for p in unit.parameters.values() if p.is_meta}
    drawn: set[int] = set()
    for name, module in _children_first(unit.module, unit.name):
        own = list(module.parameters(recurse=False))
        below = {id(p) for p in module.parameters()}
        inner = init is not None and below <= mine and not below.isdisjoint(fresh)
        if not inner and fresh.isdisjoint(id(p) for p in own):
            continue
        kept = [(p, p.detach().clone()) for p in own if id(p) in drawn]
        for parameter in own:
            if parameter.is_meta:
                swap_parameter(parameter, torch.empty_like(parameter, device="cpu"))
        buffers = _allocate_buffers(module)
        _initialize_module(module, name, init)
        _check_buffers(module, name, buffers)
        for parameter, values in kept:
            parameter.detach().copy_(values)
        drawn |= fresh & {id(p) for p in own}


def initialize_buffers(module: nn.Module, name: str, init: Init | None) -> None:
    """Initialize the buffers of a module that are on the meta device.

    Args:
        module: The module.
        name: What errors call it.
        init: Called with it; None: its ``reset_parameters``.

    Raises:
        OptionError: The module has parameters too, which have their values by now and would get
            others; or it has no initializer; or a buffer got no values.
    """
    buffers = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
    unable = init is None and not hasattr(module, "reset_parameters")
    if unable or any(True for _ in module.parameters(recurse=False)):
        raise _no_values_error(module, name, buffers)
    filled = _allocate_buffers(module)
    _initialize_module(module, name, init)
    _check_buffers(module, name, filled)


def swap_parameter(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Replace the contents of ``parameter`` by ``values``, for all references to it."""
    exchange: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
    exchange(parameter, nn.Parameter(values, parameter.requires_grad))


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child, part in module.named_children():
        yield from _children_first(part, f"{name}.{child}" if name else child)
    yield name, module


def validate_initializable(unit: Unit) -> None:
    """Check that modules on the meta device have ``reset_parameters``.

    Raises:
        OptionError: One has not.
    """
    mine = {id(p) for p in unit.parameters.values() if p.is_meta}
    for name, module in _children_first(unit.module, unit.name):
        own = {id(p) for p in module.parameters(recurse=False)}
        if not own.isdisjoint(mine) and not hasattr(module, "reset_parameters"):
            raise _no_initializer_error(module, name)


def _initialize_module(module: nn.Module, name: str, init: Init | None) -> None:
    own = getattr(module, "reset_parameters", None)
    if init is None and own is None:
        raise _no_initializer_error(module, name)
    with torch.no_grad():
        if init is not None:
            init(module)
        elif own is not None:
            own()


def _no_initializer_error(module: nn.Module, name: str) -> OptionError:
    message = (
        f"{name or 'The model'} ({type(module).__name__}) is on the meta device and has no"
        " reset_parameters(): pass init=, a function that gives a module its first values"
        " (init=model._init_weights for a model of transformers), or weights=, safetensors to"
        " load."
    )
    return OptionError(message)


def _allocate_buffers(module: nn.Module) -> list[str]:
    """Allocate buffers that are on the meta device; return their names."""
    names = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
    for name in names:
        buffer = module.get_buffer(name)
        filled = torch.empty_like(buffer, device="cpu").fill_(_sentinel(buffer.dtype))
        module._buffers[name] = filled  # noqa: SLF001
    return names


def _sentinel(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min


def _check_buffers(module: nn.Module, name: str, buffers: list[str]) -> None:
    missing = []
    for key in buffers:
        buffer = module.get_buffer(key)
        unlikely = _sentinel(buffer.dtype)
        blank = buffer.isnan() if isinstance(unlikely, float) else buffer == unlikely
        # A boolean one has no unlikely value: it counts as missing if nothing in it is set.
        if (blank.all() if buffer.dtype == torch.bool else blank.any()) and buffer.numel():
            missing.append(key)
    if missing:
        raise _no_values_error(module, name, missing)


def _no_values_error(module: nn.Module, name: str, buffers: list[str]) -> OptionError:
    full = ", ".join(f"{name}.{b}" if name else b for b in buffers)
    message = (
        f"{full} of {type(module).__name__} is a buffer on the meta device that nothing gave"
        " values: pass init=, a function that gives a module its first values, buffers included"
        " (init=model._init_weights for a model of transformers), or weights= that have it, or put"
        f" it there before stow(): model.get_submodule({name!r}).{buffers[0]} = ..."
    )
    return OptionError(message)
