"""``micro_batches``: all micro-batches go through one unit before the next, in plain autograd.

[Note: Vertical order] A unit's weights are gathered for its forward and for its backward, by hooks
around both. Inside them its forward is called once for each micro-batch, so that a weight is read
as often as for one. The last micro-batch goes first: autograd runs the node that was made last
before others, so backward takes the first micro-batch first, one after the other, and each weight's
gradient is summed in the order in which accumulation would sum it.

A unit that has units inside (the model itself; a block with tiles) is called once, for the whole
batch: of its own modules those that have parameters, and whose tensors all have the batch, are cut
in the same way, and the others (position embeddings of all samples; tiles, which are given tokens
of all samples in one dimension) run whole.

[Note: The first forward] The model runs twice on a few samples before its first forward with
gradients, without gradients: what each module takes and returns with each tells where the batch is
(batch_dimensions.py). Buffers and random numbers are put back.
"""

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.base.errors import OptionError
from tensorstow.fsdp.batch_dimensions import (
    BatchDimensions,
    ObservedCalls,
    UnknownBatchError,
    batch_of,
    samples_of,
)
from tensorstow.fsdp.gathered import records_of
from tensorstow.fsdp.micro_batch_sums import CallSums, WeightSum, put_back
from tensorstow.fsdp.placed_activations import blocks_with_activations
from tensorstow.fsdp.units import ROOT, Unit

logger = logging.getLogger("tensorstow")


class VerticalOrder:
    """Cuts the forwards of a sharded model's units into micro-batches."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], micro_batches: int, device: torch.device
    ) -> None:
        """Take a sharded model, whose batch is cut into ``micro_batches``."""
        self._model = weakref.ref(model)
        self._parts = micro_batches
        self._device = device
        self._observed: ObservedCalls | None = None
        """Calls of the modules, while the model runs to record them; None otherwise."""
        self._dimensions: dict[str, BatchDimensions] | None = None
        """Batch dimensions by the modules' names; None: before the first forward."""
        self._warned_names: set[str] = set()
        self._sums: Any = WeakIdKeyDictionary()
        """Sums by the gathered weight, which FSDP2 makes in the first forward and keeps."""
        names = {id(module): name for name, module in model.named_modules()}
        modules = [(names[id(module)], module, owner) for module, owner in _modules_to_cut(units)]
        self._modules = [
            (n, weakref.ref(module), weakref.ref(owner)) for n, module, owner in modules
        ]
        """Names of the modules whose forwards are cut, the modules, and the units with them."""
        cut_whole = {name for name, module, owner in modules if module is owner}
        self._blocks = cut_whole & {ROOT, *blocks_with_activations(units)}
        """Names of the units that must be cut: not tiles, which see samples in one row."""

    def register(self) -> None:
        """Register the hooks before existing ones: FSDP2 must not have begun."""
        model = self._model()
        if model is None:
            return
        model.register_forward_pre_hook(self._pre_forward, prepend=True, with_kwargs=True)
        for name, reference, owner in self._modules:
            module = reference()
            if module is not None:
                _replace_forward(module, partial(self._run, name, owner))

    # Dynamo would trace what only looks at shapes; it compiles the forwards inside.
    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _pre_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        in_backward = torch._C._current_graph_task_id() != -1  # noqa: SLF001  # a checkpoint's
        if self._observed is not None or not torch.is_grad_enabled() or in_backward:
            return
        batch = batch_of(args, kwargs)
        if batch % self._parts:
            message = (
                f"micro_batches={self._parts} was given, and the model was called with a batch of"
                f" {batch}: it is to divide evenly."
            )
            raise OptionError(message)
        if self._dimensions is None:
            sizes = (2, 3) if batch > 2 else (1, 2)
            seen = [self._observe(model, *samples_of(args, kwargs, batch, size)) for size in sizes]
            self._dimensions = self._compare(seen[0], seen[1], sizes)

    def _observe(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ObservedCalls:
        """Return the inputs and outputs of the modules in a forward without side effects."""
        self._observed = seen = ObservedCalls()
        try:
            with torch.no_grad(), _random_numbers_kept(self._device), _buffers_kept(model):
                model(*args, **kwargs)
        finally:
            self._observed = None
        return seen

    def _compare(
        self, first: ObservedCalls, second: ObservedCalls, sizes: tuple[int, int]
    ) -> dict[str, BatchDimensions]:
        dimensions = {
            name: BatchDimensions.of(first.calls[name], second.calls[name], sizes)
            for name, _, _ in self._modules
            if name in first.calls or name in second.calls
        }
        for name in self._blocks & dimensions.keys():
            if dimensions[name].unknown:
                message = (
                    f"micro_batches={self._parts} was given, and unit {name!r} cannot be called"
                    f" with a part of the batch: {dimensions[name].unknown}. A unit takes and"
                    " returns tensors with the batch in a dimension of its own, and others that all"
                    " samples share (a cache of keys and values is neither: use_cache=False)."
                    " Leave micro_batches out, or name other units by units=."
                )
                raise OptionError(message)
        return dimensions

    # --- a module's forward ---

    # Dynamo compiles what is called here: the forwards alone.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # noqa: SLF001
    def _run(
        self,
        name: str,
        owner: "weakref.ref[nn.Module]",
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Return what ``forward`` does; with gradients it is called for each micro-batch."""
        if self._observed is not None:
            return self._observed.observe(name, forward, args, kwargs)
        dimensions = (self._dimensions or {}).get(name)
        if dimensions is None or dimensions.unknown or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        unit = owner()
        sums = self._sums_of(unit, keep=module is unit and dimensions.calls > 1)
        try:
            calls = dimensions.split(args, kwargs, self._parts, sums.anchor)
        except UnknownBatchError as error:
            self._warn(name, error)
            return forward(*args, **kwargs)
        outputs: list[Any] = [None] * len(calls)
        for i in reversed(range(len(calls))):
            replaced = sums.put_aliases(module)
            try:
                outputs[i] = forward(*calls[i][0], **calls[i][1])
            finally:
                put_back(replaced)
        return dimensions.concatenate(outputs)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _warn(self, name: str, error: UnknownBatchError) -> None:
        if name not in self._warned_names:
            self._warned_names.add(name)
            logger.warning(
                "micro_batches: %s runs with the whole batch, whose dimension is not known (%s)."
                " Weights are read as often; its activations are those of the whole batch",
                name or "the model",
                error,
            )

    # --- sums ---

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def _sums_of(self, owner: nn.Module | None, *, keep: bool) -> CallSums:
        """Return the sums of the gradients of a unit's gathered weights, and of the root's.

        ``keep``: until autograd has gone through all calls.
        """
        sums = CallSums()
        for module in (owner, self._model()):
            for group, sharded in records_of([module]):
                whole = getattr(sharded, "_unsharded_param", None)
                if whole is not None and whole.requires_grad:
                    if whole not in self._sums:
                        self._sums[whole] = WeightSum(sharded, whole, group)
                    sums.by_weight[id(whole)] = self._sums[whole]
                    if keep and module is owner:
                        sums.kept.append((whole, self._sums[whole]))
        return sums


def _modules_to_cut(units: Sequence[Unit]) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield modules whose forwards are cut, each with the unit that it is in.

    These are units; and of units that have others inside, modules with parameters of their own.
    """
    chosen = {id(unit.module) for unit in units}
    for unit in units:
        if any(id(part) in chosen for part in unit.module.modules() if part is not unit.module):
            for child in unit.module.children():
                yield from ((part, unit.module) for part in _parts_to_cut(child, chosen))
        elif next(unit.module.parameters(), None) is not None:
            yield unit.module, unit.module


def _parts_to_cut(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    if id(module) in units:
        return
    has_units = any(id(part) in units for part in module.modules())
    if not has_units and next(module.parameters(recurse=False), None) is not None:
        yield module
        return
    for child in module.children():
        yield from _parts_to_cut(child, units)


def _replace_forward(module: nn.Module, run: Callable[..., Any]) -> None:
    """Replace a module's forward by ``run``, called with the module, the forward and arguments."""
    reference = weakref.ref(module)
    custom = module.__dict__.get("forward")

    # What is compiled are the calls inside.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # noqa: SLF001
    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        alive: Any = reference()
        original = partial(type(alive).forward, alive) if custom is None else custom
        return run(alive, original, args, kwargs)

    replaced: Any = forward
    replaced.__signature__ = inspect.signature(module.forward)
    module.forward = replaced


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    """Put the states of random number generators back."""
    away = device.type != "cpu"
    with torch.random.fork_rng(
        [device.index or 0] if away else [], device_type=device.type if away else "cuda"
    ):
        yield


@contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore buffers and their values."""
    saved = [
        (module, name, buffer, None if buffer is None else buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()  # noqa: SLF001
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, copy in saved:
                module._buffers[name] = buffer  # noqa: SLF001
                if buffer is not None and copy is not None and not torch.equal(buffer, copy):
                    buffer.copy_(copy)  # batch norm changes them without a new version
