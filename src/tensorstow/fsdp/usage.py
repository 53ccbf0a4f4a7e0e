"""``usage``: the bytes that a model and its optimizer hold on each tier, and have moved."""

from dataclasses import astuple, dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tensorstow.activations.offload import activations_of
from tensorstow.activations.pool import ActivationBytes
from tensorstow.base.errors import OptionError
from tensorstow.base.keywords import names_keywords, warn_renamed
from tensorstow.base.sizes import format_bytes
from tensorstow.fsdp import report
from tensorstow.fsdp.report import ParameterBytes
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.states.memory import StateMemory
from tensorstow.states.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Usage:
    """The bytes of one rank: held now by tier, and read and written on disk since the start.

    The properties are sums over the parts; a part that is None was not asked for. As a text it is
    the sums.

    Attributes:
        parameters: Parameters and their buffers. None: no model was given.
        activations: Activations that wait on the host or on disk. None: none do.
        states: Optimizer states, gradients that updates use, and the buffers of both. None: no
            optimizer was given.
        traffic: The moves of states. None: no optimizer was given.
    """

    parameters: ParameterBytes | None = None
    activations: ActivationBytes | None = None
    states: StateMemory | None = None
    traffic: Traffic | None = None

    @property
    def device_bytes(self) -> int:
        """An accelerator's memory for parameters, states and buffers."""
        of_states = 0 if self.states is None else self.states.device_bytes
        held = self.parameters
        if held is None:
            return of_states
        buffers = held.device_bytes + held.device_cache_bytes
        return held.device_parameter_bytes + buffers + of_states

    @property
    def host_bytes(self) -> int:
        """The CPU's memory for parameters, states, activations and buffers."""
        total = 0 if self.states is None else self.states.host_bytes
        total += 0 if self.activations is None else self.activations.host_bytes
        held = self.parameters
        if held is None:
            return total
        return total + held.host_bytes + held.buffer_pool_bytes + held.staging_bytes

    @property
    def disk_bytes(self) -> int:
        """The bytes of parameters, states and activations on disk, and of states' padding."""
        total = 0 if self.states is None else self.states.file_bytes
        total += 0 if self.activations is None else self.activations.disk_bytes
        return total + (0 if self.parameters is None else self.parameters.disk_bytes)

    @property
    def bytes_read(self) -> int:
        """The bytes read from disk so far."""
        return sum(part.bytes_read for part in self._moving())

    @property
    def bytes_written(self) -> int:
        """The bytes written to disk so far."""
        return sum(part.bytes_written for part in self._moving())

    def __str__(self) -> str:
        """Return the sums in words: "device 0 B, host 1.2 GiB, ..."."""
        sums = {
            "device": self.device_bytes,
            "host": self.host_bytes,
            "disk": self.disk_bytes,
            "read": self.bytes_read,
            "written": self.bytes_written,
        }
        return ", ".join(f"{name} {format_bytes(count)}" for name, count in sums.items())

    def _moving(self) -> list[ParameterBytes | ActivationBytes | Traffic]:
        parts = (self.parameters, self.activations, self.traffic)
        return [part for part in parts if part is not None]


@names_keywords
def usage(model: nn.Module | None = None, optimizer: Optimizer | None = None) -> Usage:
    """Return the bytes that a model and an optimizer of this rank hold, and have moved.

    Args:
        model: A model, placed by ``stow`` or not, for its parameters and activations. Default:
            None, those are left out.
        optimizer: An optimizer of tensorstow, or a wrapper of one, for its states. Default: None,
            those are left out.

    Returns:
        The bytes held now, by tier, and moved since the model was placed and the optimizer made.

    Raises:
        OptionError: Neither was given, or the model is none, or the optimizer is another project's.
    """
    placed = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's wrapper
    if placed is None and model is None:
        message = "usage() was called with neither a model nor an optimizer. Pass one, or both."
        raise OptionError(message)
    argument: object = model
    if not isinstance(argument, nn.Module | None):
        message = (
            f"usage() was called with model=, a {type(argument).__name__}: it counts the parameters"
            " of an nn.Module, and an optimizer is its second argument."
        )
        raise OptionError(message)
    if not isinstance(placed, PlacedOptimizer | None):
        message = (
            f"usage() was called with optimizer=, a {type(placed).__name__}: it counts the states"
            " of tensorstow.AdamW, Adam and StowedOptimizer."
        )
        raise OptionError(message)
    return Usage(
        None if model is None else report.parameter_bytes(model),
        None if model is None else _activations_of(model),
        None if placed is None else placed._memory(),  # noqa: SLF001  # public as usage()
        None if placed is None else placed._traffic(),  # noqa: SLF001
    )


def _activations_of(model: nn.Module) -> ActivationBytes | None:
    counts: list[Any] = [astuple(count) for count in activations_of(model)]
    return ActivationBytes(*map(sum, zip(*counts, strict=True))) if counts else None


@names_keywords
def parameter_bytes(model: nn.Module) -> ParameterBytes:
    """Return ``usage(model).parameters``, which it is the old name of.

    Args:
        model: A model, placed by ``stow`` or not.

    Returns:
        The counts.
    """
    warn_renamed("parameter_bytes(model)", "usage(model).parameters", stacklevel=4)
    return report.parameter_bytes(model)
