"""First values of parameters and buffers: the model's own, an initializer's, or from files.

Values are set a unit at a time, so that host memory never holds the whole model of a rank.

[Note: Initializers] A module's ``reset_parameters`` initializes the module's own tensors. A user's
``init`` is called as by ``Module.apply``: children first, and also for modules without tensors of
their own if all modules below them are in the unit (some rescale their children's values). A tied
parameter keeps the value from its first module. Buffers are filled with NaN, or the least number,
first: buffers that still hold it afterwards were not initialized.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.checkpoint.adapters import Adapters
from tensorstow.checkpoint.coded_weights import CodedWeight
from tensorstow.checkpoint.pretrained import PretrainedFiles, RowReader, is_of_transformers
from tensorstow.fsdp.sharding import verify_weights_together
from tensorstow.fsdp.units import Unit, aliases_of
from tensorstow.tensors.dtensor import rows_per_rank
from tensorstow.tensors.placeholder import swap_parameter

Init = Callable[[nn.Module], object]
"""Gives one module its first values."""


def reader_of(whole: torch.Tensor) -> RowReader:
    """Return a reader of the rows of ``whole``, or of all of it if it is a scalar."""
    return lambda start, stop: (whole.detach()[start:stop] if whole.ndim else whole.detach()).cpu()


class InitialValues:
    """First values of parameters and buffers, the same on every rank."""

    def __init__(
        self,
        model: nn.Module,
        weights: str | os.PathLike[str] | None,
        init: Init | None = None,
    ) -> None:
        """Set the source of the values.

        Args:
            model: The model, before its parameters are replaced.
            weights: Safetensors, a file or a directory; None: the model's own values.
            init: Initializes one module; None: the module's ``reset_parameters``.
        """
        self.files = None if weights is None else PretrainedFiles(weights, model)
        """The files with the values; None: they come from the model or its initializers."""
        self.adapters = Adapters(model)
        """The adapters of peft, which keep their values or are initialized by peft."""
        self._unset_adapters: Adapters | None = self.adapters
        self._aliases = aliases_of(model)
        self._init = init
        self._group: dist.ProcessGroup | None = None
        base: Any = self.adapters.base
        if init is None and self.files is not None and is_of_transformers(base):
            self._init = base._init_weights  # noqa: SLF001  # it computes the model's buffers

    def names_of(self, name: str) -> list[str]:
        """Return a parameter's name, and the further ones of a tied parameter."""
        return [name, *self._aliases.get(name, [])]

    def check(self, units: Iterable[Unit], group: dist.ProcessGroup | None = None) -> None:
        """Check that every parameter will have values, before anything is placed; collective.

        All ranks of ``group`` get the same values; None: a single rank.

        Raises:
            StoreFormatError: The files lack a parameter, or have it in another shape.
            DamageError: A file has another digest than what was written.
            OptionError: A parameter on the meta device has no initializer.
        """
        self._group = group
        self.adapters.validate(None if self.files is None else self.files.has)
        for unit in units:
            if self.files is not None:
                # The call raises an error if the files lack a parameter; the values are read later.
                self._readers_of_files(self.files, unit)
            elif self._init is None:
                validate_initializable(unit)
        if self.files is not None and group is not None:
            verify_weights_together(self.files)
        elif self.files is not None:
            self.files.verify()

    def in_files(self, name: str) -> bool:
        """Return whether the values of a parameter called ``name`` are read from files.

        An adapter's parameter that the files lack keeps its own.
        """
        if self.files is None:
            return False
        return name not in self.adapters.names or self.files.has(name)

    def coded(self, units: Iterable[Unit]) -> dict[str, CodedWeight]:
        """Return the frozen weights of units that the files have as codes, by name."""
        coded: dict[str, CodedWeight] = {}
        if self.files is None or not self.files.coded:
            return coded
        for unit in units:
            for name, parameter in unit.parameters.items():
                is_read = not parameter.requires_grad and parameter.is_floating_point()
                if is_read and self.in_files(name):
                    origin = self.files.origin(self.names_of(name), parameter)
                    if origin.coded is not None:
                        coded[name] = origin.coded
        return coded

    def coded_bytes(self, units: Iterable[Unit], ranks: int) -> dict[str, int]:
        """Return the bytes of codes that each of ``ranks`` reads of the coded weights, by name."""
        return {
            name: sum(p.entry.nbytes for p in coded.parts(0, rows_per_rank(coded.shape[0], ranks)))
            for name, coded in self.coded(units).items()
        }

    def _readers_of_files(self, files: PretrainedFiles, unit: Unit) -> dict[str, RowReader]:
        return {
            n: files.reader(self.names_of(n), p) if self.in_files(n) else reader_of(p)
            for n, p in unit.parameters.items()
        }

    def _begin_adapters(self) -> None:
        """Initialize adapters on the meta device, once."""
        adapters, self._unset_adapters = self._unset_adapters, None
        if adapters is not None and adapters.names:
            with self._same_random_state():
                adapters.initialize()

    def readers(self, unit: Unit) -> dict[str, RowReader]:
        """Return readers of the unit's parameters, by name. Collective, without files.

        They read from the files, if there are any. Otherwise parameters on the meta device are
        initialized, and all ranks get the first rank's values.
        """
        self._begin_adapters()
        if self._group is not None:
            for name, parameter in unit.parameters.items():
                if not parameter.is_meta and not self.in_files(name):
                    self._broadcast(parameter.detach())
        if self.files is not None:
            return self._readers_of_files(self.files, unit)
        if any(p.is_meta for p in unit.parameters.values()):
            with self._same_random_state():
                initialize_unit(unit, self._init)
        return {n: reader_of(p) for n, p in unit.parameters.items()}

    def fill(self, units: Iterable[Unit]) -> None:
        """Fill parameters that stay unsharded. Collective, without files.

        Those on the meta device get memory on the CPU.
        """
        for unit in units:
            for name, read in self.readers(unit).items():
                parameter = unit.parameters[name]
                # readers() has kept, received or initialized the values in place.
                if not self.in_files(name):
                    continue
                values = read(0, parameter.shape[0] if parameter.ndim else 0)
                if parameter.is_meta:
                    # Mapped memory of the file is for tensors that are only read.
                    swap_parameter(parameter, values.clone() if parameter.requires_grad else values)
                else:
                    parameter.detach().copy_(values)

    def buffers(self, model: nn.Module) -> None:
        """Fill buffers from the files or with the first rank's values; collective.

        Call it after all parameters have their values. Buffers on the meta device that are in no
        file are initialized.

        Raises:
            OptionError: A buffer still has no values.
            DamageError: A file was changed while tensors were read.
        """
        for prefix, module in model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                if self.files is not None and self.files.has(full):
                    stop = buffer.shape[0] if buffer.ndim else 0
                    values = self.files.reader([full], buffer)(0, stop)
                    device = torch.device("cpu") if buffer.is_meta else buffer.device
                    # A copy: what a reader returns may be mapped from the file.
                    module._buffers[name] = values.to(device, copy=True)  # noqa: SLF001
        if self.files is not None:
            self.files.validate_unchanged()
        with self._same_random_state():
            for prefix, module in model.named_modules():
                if any(b.is_meta for b in module.buffers(recurse=False)):
                    initialize_buffers(module, prefix, self._init)
        if self._group is not None:
            for buffer in model.buffers():
                self._broadcast(buffer)

    def _broadcast(self, tensor: torch.Tensor) -> None:
        # Frozen weights may be mapped from a file: a page that is written to needs memory.
        is_written = tensor.requires_grad
        values = tensor.detach().to("cpu", copy=not is_written).contiguous()
        dist.broadcast(values, group_src=0, group=self._group)
        if is_written or not torch.equal(values, tensor.detach().cpu()):
            tensor.detach().copy_(values)

    @contextmanager
    def _same_random_state(self) -> Iterator[None]:
        """Use the first rank's random state on every rank inside the block, and restore it."""
        if self._group is None:
            yield
            return
        state = torch.get_rng_state()
        dist.broadcast(state, group_src=0, group=self._group)
        # Values are drawn on the CPU, so only its state is exchanged and restored.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            yield


def initialize_unit(unit: Unit, init: Init | None) -> None:
    """Allocate and initialize the unit's modules that are on the meta device, on the CPU.

    Parameters keep their identity. Raises OptionError if a module has no initializer, or a buffer
    got no values.
    """
    mine = {id(p) for p in unit.parameters.values()}
    fresh = {id(p) for p in unit.parameters.values() if p.is_meta}
    drawn: set[int] = set()
    for name, module in _children_first(unit.module, unit.name):
        direct = list(module.parameters(recurse=False))
        below = {id(p) for p in module.parameters()}
        inner = init is not None and below <= mine and not below.isdisjoint(fresh)
        if not inner and fresh.isdisjoint(id(p) for p in direct):
            continue
        tied = [(p, p.detach().clone()) for p in direct if id(p) in drawn]
        for parameter in direct:
            if parameter.is_meta:
                swap_parameter(parameter, torch.empty_like(parameter, device="cpu"))
        _initialize_module(module, name, init)
        for parameter, values in tied:
            parameter.detach().copy_(values)
        drawn |= fresh & {id(p) for p in direct}


def initialize_buffers(module: nn.Module, name: str, init: Init | None) -> None:
    """Initialize a module's buffers that are on the meta device.

    Raises OptionError if the module has parameters, whose values an initializer would overwrite.
    """
    buffers = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
    unable = init is None and not hasattr(module, "reset_parameters")
    if unable or any(True for _ in module.parameters(recurse=False)):
        raise _no_values_error(module, name, buffers)
    _initialize_module(module, name, init)


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child, part in module.named_children():
        yield from _children_first(part, f"{name}.{child}" if name else child)
    yield name, module


def validate_initializable(unit: Unit) -> None:
    """Check that modules on the meta device have ``reset_parameters``."""
    mine = {id(p) for p in unit.parameters.values() if p.is_meta}
    for name, module in _children_first(unit.module, unit.name):
        direct = {id(p) for p in module.parameters(recurse=False)}
        if not direct.isdisjoint(mine) and not hasattr(module, "reset_parameters"):
            raise _no_initializer_error(module, name)


def _initialize_module(module: nn.Module, name: str, init: Init | None) -> None:
    """Initialize a module, with those of its buffers that are on the meta device."""
    reset = getattr(module, "reset_parameters", None)
    if init is None and reset is None:
        raise _no_initializer_error(module, name)
    buffers = _allocate_buffers(module)
    with torch.no_grad():
        if init is not None:
            init(module)
        elif reset is not None:
            reset()
    _check_buffers(module, name, buffers)


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
        # A boolean buffer has no unlikely value: it counts as missing if no element is True.
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
