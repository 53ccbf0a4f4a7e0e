"""First values of what is on the meta device, module by module.

[Note: Initialisers] A module's ``reset_parameters`` gives values to what the module itself has. An
``init`` of the user's is called as by ``Module.apply``: with children first, and with modules that
have nothing of their own where all below them is in the unit (some scale what their children drew).
What a tied parameter got from its first module stays. Buffers are filled with NaN, or the least
number, before: what is still there afterwards was given no values.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.units import Unit

Init = Callable[[nn.Module], object]


def initialise(unit: Unit, init: Init | None) -> None:
    """Give memory on the CPU to the unit's modules that are on the meta device, and first values.

    ``init`` is called with each such module; None: its ``reset_parameters``. Parameters keep their
    identity. Raises OptionError for a module that has none.
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
                swap(parameter, torch.empty_like(parameter, device="cpu"))
        buffers = _blank_buffers(module)
        _first_values(module, name, init)
        _check_filled(module, name, buffers)
        for parameter, values in kept:
            parameter.detach().copy_(values)
        drawn |= fresh & {id(p) for p in own}


def initialise_buffers(module: nn.Module, name: str, init: Init | None) -> None:
    """Give values to the buffers of ``module`` that are on the meta device.

    Raises OptionError where the module has parameters too, which have their values by now.
    """
    buffers = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
    unable = init is None and not hasattr(module, "reset_parameters")
    if unable or any(True for _ in module.parameters(recurse=False)):
        raise _without_values(module, name, buffers)
    filled = _blank_buffers(module)
    _first_values(module, name, init)
    _check_filled(module, name, filled)


def swap(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Let ``parameter``, wherever it is known, be ``values``."""
    exchange: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
    exchange(parameter, nn.Parameter(values, parameter.requires_grad))


def _children_first(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    for child, part in module.named_children():
        yield from _children_first(part, f"{name}.{child}" if name else child)
    yield name, module


def check_initialisable(unit: Unit) -> None:
    """Raise OptionError unless what is on the meta device can initialise itself."""
    mine = {id(p) for p in unit.parameters.values() if p.is_meta}
    for name, module in _children_first(unit.module, unit.name):
        own = {id(p) for p in module.parameters(recurse=False)}
        if not own.isdisjoint(mine) and not hasattr(module, "reset_parameters"):
            raise _without_initialiser(module, name)


def _first_values(module: nn.Module, name: str, init: Init | None) -> None:
    own = getattr(module, "reset_parameters", None)
    if init is None and own is None:
        raise _without_initialiser(module, name)
    with torch.no_grad():
        if init is not None:
            init(module)
        elif own is not None:
            own()


def _without_initialiser(module: nn.Module, name: str) -> OptionError:
    message = (
        f"{name or 'The model'} ({type(module).__name__}) is on the meta device and has no"
        " reset_parameters(): pass init=, a function that gives a module its first values"
        " (init=model._init_weights for a model of transformers), or weights=, safetensors to"
        " load."
    )
    return OptionError(message)


def _blank_buffers(module: nn.Module) -> list[str]:
    """Give memory to buffers on the meta device; return the names of those."""
    names = [n for n, b in module.named_buffers(recurse=False) if b.is_meta]
    for name in names:
        buffer = module.get_buffer(name)
        filled = torch.empty_like(buffer, device="cpu").fill_(_unlikely(buffer.dtype))
        module._buffers[name] = filled  # noqa: SLF001
    return names


def _unlikely(dtype: torch.dtype) -> float | bool:
    if dtype == torch.bool:
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return torch.iinfo(dtype).min


def _check_filled(module: nn.Module, name: str, buffers: list[str]) -> None:
    missing = []
    for key in buffers:
        buffer = module.get_buffer(key)
        unlikely = _unlikely(buffer.dtype)
        blank = buffer.isnan() if isinstance(unlikely, float) else buffer == unlikely
        # All that a boolean one may be is likely: it is told by having nothing set at all.
        if (blank.all() if buffer.dtype == torch.bool else blank.any()) and buffer.numel():
            missing.append(key)
    if missing:
        raise _without_values(module, name, missing)


def _without_values(module: nn.Module, name: str, buffers: list[str]) -> OptionError:
    full = ", ".join(f"{name}.{b}" if name else b for b in buffers)
    message = (
        f"{full} of {type(module).__name__} is a buffer on the meta device that nothing gave"
        " values: pass init=, a function that gives a module its first values, buffers included"
        " (init=model._init_weights for a model of transformers), or weights= that have it, or put"
        f" it there before stow(): model.get_submodule({name!r}).{buffers[0]} = ..."
    )
    return OptionError(message)
