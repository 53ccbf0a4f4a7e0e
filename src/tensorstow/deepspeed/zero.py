"""``deepspeed.zero``: ``Init``, ``GatheredParameters``, ``TiledLinear`` and memory estimators.

``OnDevice``, which is ``deepspeed``'s, is such a context as ``Init``.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.base.errors import OptionError
from tensorstow.base.keywords import refuse_unknown_keywords
from tensorstow.base.sizes import format_count
from tensorstow.deepspeed.comm import init_distributed
from tensorstow.deepspeed.config.values import say_once
from tensorstow.deepspeed.estimators import (
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from tensorstow.deepspeed.external_parameters import (
    register_external_parameter,
    unregister_external_parameter,
)
from tensorstow.deepspeed.registry import (
    SHARDS_PARAMETERS,
    RegisteredModel,
    mark_whole,
    owner_of,
    placed_of,
    registered,
)
from tensorstow.doorkit.construction import ConstructionContext
from tensorstow.fsdp.full_tensors import copy_from_full, is_whole_in_place, whole_in_place
from tensorstow.fsdp.module_hooks import is_unsharded
from tensorstow.fsdp.sharding import from_every_rank, rank_here
from tensorstow.nn.tiled_linear import TiledLinear
from tensorstow.tensors.dtensor import is_sharded

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "TiledLinear",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]


logger = logging.getLogger("tensorstow")

_IDLE = frozenset(
    {
        *("config", "config_dict_or_path", "data_parallel_group", "mem_efficient_linear", "mpu"),
        *("param_dict", "pin_memory", "remote_device", "sequence_data_parallel_group"),
        *("zero_param_parallel_group", "zero_quantized_nontrainable_weights"),
        "zero_quantized_weights",
    }
)
"""Keywords of upstream's that the configuration decides here, or nothing does."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_Seen = tuple[int, int, int]


class OnDevice(ConstructionContext):
    """A context in which modules and tensors are created on a device, in a dtype.

    Args:
        dtype: The dtype of floating-point tensors.
        device: The device; "meta" has no memory.
        enabled: Whether the context has an effect.
    """

    def __init__(
        self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True
    ) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        super().__init__(*((device, dtype) if enabled else ()))


class Init(ConstructionContext):
    """A context in which modules are created for ``initialize``, with the values they create.

    The process group is joined, as by ``init_distributed``, if there is none. Every parameter is in
    host memory, as constructors leave it. Of several ranks the first keeps the values. The others
    give a module's memory back once it belongs to another module: until ``initialize`` their
    parameters have no values outside of ``GatheredParameters``. To create a model without memory on
    any rank use ``torch.device("meta")``: its first values come from ``reset_parameters``, as
    ``initialize`` places one block after the other.

    Args:
        module: A module that exists, which needs no context. Default: None.
        enabled: Whether the context has an effect.
        dtype: The dtype of floating-point parameters. Default: None, torch's default.
        keywords: Upstream's other keywords; they have no effect, which is logged.

    Raises:
        KeywordError: A keyword that upstream lacks.
        OptionError: As for ``init_distributed``.
        RankError: The ranks did not meet.
    """

    def __init__(
        self,
        module: torch.nn.Module | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        **keywords: object,
    ) -> None:
        accepted = [*sorted(_IDLE), "module", "enabled", "dtype"]
        refuse_unknown_keywords("zero.Init", keywords, accepted)
        if keywords:
            logger.info("zero.Init: %s have no effect here", ", ".join(sorted(keywords)))
        init_distributed()
        if module is not None and dtype is not None:
            module.to(dtype)
        super().__init__(dtype=dtype)
        self._created: list[torch.nn.Module] | None = [] if enabled else None

    def __enter__(self) -> Self:
        """Note modules that are created from here on."""
        if self._created is not None:
            for hook in (
                register_module_parameter_registration_hook(self._note),
                register_module_module_registration_hook(self._give_back_memory),
            ):
                self._entered.callback(hook.remove)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        for module in self._created or ():
            _keep_values_of_first_rank(module.parameters(recurse=False))
        self._created = None if self._created is None else []

    def _note(self, module: torch.nn.Module, _: str, __: object) -> None:
        if self._created is not None:
            self._created.append(module)

    @staticmethod
    def _give_back_memory(_: torch.nn.Module, __: str, child: torch.nn.Module | None) -> None:
        if child is not None:
            _keep_values_of_first_rank(child.parameters())


MiCS_Init = Init
"""Upstream's for `mics_shard_size`, which the configuration of `initialize` says."""

_OF_FIRST_RANK: Any = WeakIdKeyDictionary()
"""Parameters that have values on the first rank alone, until ``initialize`` places them."""


def _keep_values_of_first_rank(parameters: Iterable[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        if not parameter.is_meta:
            _OF_FIRST_RANK[parameter] = True
            if rank_here() > 0:  # memory that nothing has written to takes none
                parameter.data = torch.empty_like(parameter.data)


class DroppedChanges:
    """The parameters of one context whose writes are lost: those without a ``modifier_rank``."""

    def __init__(self) -> None:
        self._watched: dict[int, list[tuple[torch.Tensor, _Seen]]] = {}
        self._owner: RegisteredModel | None = None
        self._changed: list[torch.Tensor] = []

    def watch(self, owner: RegisteredModel, placed: torch.Tensor, captured: torch.Tensor) -> None:
        """Remember what a parameter is, which is whole now.

        ``captured`` is a variable's from before the model was placed, or the same.
        """
        self._owner = owner
        both = {id(p): p for p in (placed, captured)}.values()
        self._watched[id(placed)] = [(p, _seen(p)) for p in both]

    def note(self, placed: torch.Tensor) -> None:
        """Look whether a watched parameter, still whole, was written to."""
        if any(_seen(p) != before for p, before in self._watched.get(id(placed), ())):
            self._changed.append(placed)

    def tell(self) -> None:
        """Log once that changes were dropped; collective where that is an error.

        Raises OptionError on every rank, if the configuration asks for it and a rank has written.
        """
        if self._owner is None:
            return
        is_changed = bool(self._changed)
        if self._owner.checks_writes:
            is_changed = any(from_every_rank(is_changed))
        if not is_changed:
            return
        names = {id(p): name for name, p in self._owner.module.named_parameters()}
        first = names.get(id(self._changed[0])) if self._changed else None
        writer = "by another rank" if first is None else f"to {first}"
        message = (
            f"{format_count(max(1, len(self._changed)), 'parameter')} (written {writer}) changed"
            f" inside of GatheredParameters without a modifier_rank, and changes were dropped:"
            " pass modifier_rank=, the rank whose changes are kept."
        )
        if self._owner.checks_writes:
            raise OptionError(message)
        say_once(message)


def _seen(parameter: torch.Tensor) -> _Seen:
    """Return what a write changes: where the elements are, their version, or their sum of bits.

    A write to ``.data`` counts no version.
    """
    values = parameter.detach()
    integers = values.reshape(-1).view(_INTEGERS[values.element_size()])
    return parameter.data_ptr(), parameter._version, int(integers.sum(dtype=torch.int64))  # noqa: SLF001


@contextmanager
def GatheredParameters(  # noqa: N802  # upstream's name
    params: torch.Tensor | Iterable[torch.Tensor | None],
    modifier_rank: int | None = None,
    fwd_module: torch.nn.Module | None = None,
    enabled: bool = True,
) -> Iterator[list[torch.Tensor | None]]:
    """Make parameters whole inside the context; call it on every rank.

    The parameters themselves are whole: variables that were set to them before, and the attributes
    of modules. A parameter that a variable has from before ``initialize`` is whole at any time, and
    current inside the context.

    Args:
        params: A parameter, or several; None stands for one that a layer lacks.
        modifier_rank: The rank whose changes are kept. Default: None: under stage 3 changes are
            dropped, which is said once, or an error with ``enable_sanity_checks``. Those of plain
            parameters (below stage 3 on the CPU, or of a model without an engine) are kept.
        fwd_module: Not used: nothing is fetched in advance.
        enabled: Whether the context has an effect.

    Yields:
        The parameters.

    Raises:
        OptionError: Parameters are to be written between a forward and its backward; or were
            written without a ``modifier_rank``, with ``enable_sanity_checks``: on every rank.
    """
    del fwd_module
    parameters = [params] if isinstance(params, torch.Tensor) else list(params)
    changes = DroppedChanges()
    with ExitStack() as whole:
        if enabled:
            for parameter in {id(p): p for p in parameters if p is not None}.values():
                whole.enter_context(_whole(parameter, modifier_rank, changes))
        yield parameters
    changes.tell()


@contextmanager
def unwrap_model_for_generation(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Make all parameters of an engine whole inside the context; call it on every rank.

    Blocks are gathered by each forward as ever, also inside: every rank generates as often.

    Args:
        model: An engine.

    Yields:
        The engine.
    """
    with GatheredParameters(model.parameters()):
        yield model


@contextmanager
def _whole(
    parameter: torch.Tensor, modifier_rank: int | None, changes: DroppedChanges
) -> Iterator[None]:
    """Make a parameter whole, and keep what ``modifier_rank`` changes."""
    placed = placed_of(parameter)
    owner = owner_of(placed)
    if owner is None:
        is_of_forward = _of_forward(parameter, modifier_rank)
        if parameter in _OF_FIRST_RANK:
            _broadcast(parameter, 0)
        yield
        if not is_of_forward:
            _broadcast(parameter, modifier_rank)
        return
    owner.optimizer.wait([placed])
    if owner.stage < SHARDS_PARAMETERS and parameter is placed and not is_sharded(placed):
        yield
        _broadcast(parameter, modifier_rank)
        # A write to .data counts no version, by which an update sees that a weight was written.
        torch.autograd.graph.increment_version(parameter)
        return
    is_outermost = not is_whole_in_place(placed)
    with whole_in_place(placed) as shard:
        mark_whole(placed, shard)
        if placed is not parameter:
            parameter.data.copy_(placed.data)
        if modifier_rank is None and is_outermost:
            changes.watch(owner, placed, parameter)
        yield
        changes.note(placed)
        if modifier_rank is not None:
            _broadcast(parameter, modifier_rank)
            if placed is not parameter:
                placed.data.copy_(parameter.data)
            copy_from_full(shard, placed.data)


def _of_forward(parameter: torch.Tensor, modifier_rank: int | None) -> bool:
    """Return whether a forward has unsharded a parameter; raises OptionError if it is written."""
    is_open = any(is_unsharded(owner.module, parameter) for owner in registered().values())
    if is_open and modifier_rank is not None:
        message = (
            "GatheredParameters(modifier_rank=...) was called between a forward and its backward,"
            " with a weight that is whole until then: write it after backward."
        )
        raise OptionError(message)
    return is_open


def _broadcast(parameter: torch.Tensor, modifier_rank: int | None) -> None:
    if modifier_rank is not None and dist.is_initialized():
        dist.broadcast(parameter.data, modifier_rank)
