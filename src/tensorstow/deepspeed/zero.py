"""``deepspeed.zero``: ``Init``, ``GatheredParameters``, ``TiledLinear`` and memory estimators."""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from tensorstow.deepspeed.registry import holders_of
from tensorstow.fsdp.full_tensors import copy_from_full, full_copy
from tensorstow.nn.tiled_linear import TiledLinear
from tensorstow.tensors.dtensor import shard_of

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
]


logger = logging.getLogger("tensorstow")

_IDLE = frozenset(
    {
        "config",
        "config_dict_or_path",
        "data_parallel_group",
        "mem_efficient_linear",
        "mpu",
        "param_dict",
        "pin_memory",
        "remote_device",
        "sequence_data_parallel_group",
        "zero_param_parallel_group",
        "zero_quantized_nontrainable_weights",
        "zero_quantized_weights",
    }
)
"""Keywords of upstream's that the configuration decides here, or nothing does."""


class Init:
    """A context in which modules are created without memory, until ``initialize`` places them.

    They are on the meta device. ``initialize`` allocates one block at a time and calls
    ``reset_parameters`` of its modules. Other values that a constructor writes to its
    parameters are lost, with a warning: load such values later.

    Args:
        module: Must be None: a module that exists needs no context.
        enabled: Whether the context has an effect.
        dtype: The dtype of floating-point parameters. Default: None, torch's default.
        others: Upstream's other keywords; they have no effect, which is logged.

    Raises:
        OptionError: ``module`` is given, or a keyword that upstream lacks.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        enabled: bool = True,  # noqa: FBT001, FBT002  # upstream's
        dtype: torch.dtype | None = None,
        **others: object,
    ) -> None:
        """Refuse ``module``: it has memory already."""
        for name in others:
            if name not in _IDLE:
                near = get_close_matches(name, [*_IDLE, "module", "enabled", "dtype"], 1)
                message = f"zero.Init has no keyword {name!r}" + (
                    f": {near[0]!r}?" if near else "."
                )
                raise OptionError(message)
        if others:
            logger.info("zero.Init: %s have no effect here", ", ".join(sorted(others)))
        if module is not None:
            message = (
                "zero.Init(module=...) was given a module that has memory already: initialize()"
                " places it as it is. Leave Init out, or create the module inside of it."
            )
            raise OptionError(message)
        self._device = torch.device("meta") if enabled else None
        self._dtype = dtype
        self._before = torch.get_default_dtype()

    def __enter__(self) -> Self:
        """Create modules without memory from here on."""
        if self._device is not None:
            logger.warning(
                "zero.Init: modules get their first values from reset_parameters(); other values"
                " that their constructors write are not kept"
            )
            self._device.__enter__()
        if self._dtype is not None:
            self._before = torch.get_default_dtype()
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Create modules as before."""
        if self._dtype is not None:
            torch.set_default_dtype(self._before)
        if self._device is not None:
            self._device.__exit__(kind, error, trace)


@contextmanager
def GatheredParameters(  # noqa: N802  # upstream's name
    params: torch.nn.Parameter | Iterable[torch.nn.Parameter],
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,  # noqa: FBT001, FBT002
) -> Iterator[list[torch.nn.Parameter]]:
    """Give the modules of an engine full parameters inside the context; call it on every rank.

    ``layer.weight`` is another tensor inside the context than outside. A variable that was set to
    it before is still the sharded parameter.

    Args:
        params: A parameter, or several.
        modifier_rank: The rank whose changes are kept. Default: None, changes are dropped.
        fwd_module: Not used: nothing is fetched in advance.
        enabled: Whether the context has an effect.

    Yields:
        The full parameters.

    Raises:
        OptionError: A sharded parameter was written inside the context, with a ``modifier_rank``.
    """
    del fwd_module
    given = [params] if isinstance(params, torch.nn.Parameter) else list(params)
    if not enabled:
        yield given
        return
    whole = [torch.nn.Parameter(full_copy(p), p.requires_grad) for p in given]
    versions = [shard_of(p)._version for p in given]  # noqa: SLF001
    with ExitStack() as exchanged:
        for parameter, values in zip(given, whole, strict=True):
            exchanged.enter_context(_exchanged(parameter, values))
        yield whole
    if modifier_rank is None:
        return
    if versions != [shard_of(p)._version for p in given]:  # noqa: SLF001
        message = (
            "A sharded parameter was written inside GatheredParameters(modifier_rank=...). Write to"
            " the parameters that the context yields, or to the module's attributes."
        )
        raise OptionError(message)
    for parameter, values in zip(given, whole, strict=True):
        if dist.is_initialized():
            dist.broadcast(values.detach(), modifier_rank)
        copy_from_full(parameter, values.detach())


@contextmanager
def _exchanged(parameter: torch.nn.Parameter, values: torch.nn.Parameter) -> Iterator[None]:
    """Put ``values`` wherever a placed model has ``parameter``; put it back afterwards."""
    places = list(holders_of(parameter))
    for module, name in places:
        module._parameters[name] = values  # noqa: SLF001
    try:
        yield
    finally:
        for module, name in places:
            module._parameters[name] = parameter  # noqa: SLF001
