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

[Note: Sums of micro-batches] Each micro-batch computes with aliases of the weights that are leaves
of their own. So a weight that is used twice in a micro-batch has one gradient from it. It is added
to a sum in fp32, which goes to ``unsharded_accumulated_grad``, where FSDP2 keeps gradients that it
has not reduced. FSDP2 reduces it in fp32 after the unit's backward, and does so after the backward
of each call. So sums of a unit that is called several times in a forward go to FSDP2 only when
autograd has passed all calls. An anchor at the input of each call makes autograd wait for them: it
returns a gradient of zeros for one of the weights.
"""

import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from tensorstow.base.errors import OptionError, StowError
from tensorstow.fsdp.batch_dimensions import (
    BatchDimensions,
    ObservedCalls,
    UnknownBatchError,
    batch_of,
    samples_of,
)
from tensorstow.fsdp.module_hooks import records_of
from tensorstow.fsdp.placed_activations import blocks_with_activations
from tensorstow.fsdp.units import ROOT, Unit

logger = logging.getLogger("tensorstow")

_NARROW = (torch.bfloat16, torch.float16)
Replaced = tuple[dict[str, Any], str, torch.Tensor]
"""A module's table of parameters, a name in it, and the weight of that name."""


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
        # The last micro-batch goes first ([Note: Vertical order]).
        for i in reversed(range(len(calls))):
            replaced = sums.put_aliases(module)
            try:
                outputs[i] = forward(*calls[i][0], **calls[i][1])
            finally:
                _put_back(replaced)
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
    def _sums_of(self, owner: nn.Module | None, *, keep: bool) -> "CallSums":
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
    # Weak: the module has the function below as its ``forward``.
    reference = weakref.ref(module)
    # A forward that is set on the module itself goes before that of its class.
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
    # Without devices only the CPU's state is kept, and the type has no effect.
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


# --- sums of gradients ---


class WeightSum:
    """The sum of one weight's gradients over micro-batches, until FSDP2 has it."""

    def __init__(self, sharded: Any, whole: torch.Tensor, group: Any) -> None:  # noqa: ANN401
        """Watch a weight."""
        self._sharded: weakref.ref[Any] = weakref.ref(sharded)
        self._deferred: torch.Tensor | None = None
        self._backward = -1
        """The backward that computes ``_deferred``: a sum of a backward that raised is dropped."""
        hook: Any = whole.register_post_accumulate_grad_hook
        hook(self._take_over)
        if whole.dtype in _NARROW:  # FSDP2 takes gradients of one dtype, and casts to another
            sharded.sharded_param.grad_dtype = None
            if group._orig_dtype in _NARROW:  # noqa: SLF001
                group._orig_dtype = torch.float32  # noqa: SLF001
        self.anchored: list[WeightSum] = []
        """The sums that are complete when autograd reaches this weight."""

    @torch.no_grad()
    def add(self, alias: torch.Tensor, *, is_deferred: bool) -> None:
        """Take a micro-batch's gradient from an alias of the weight, whose hook this is."""
        gradient, alias.grad = alias.grad, None
        if gradient is None:
            return
        if not is_deferred:
            self._give(gradient)
            return
        backward = torch._C._current_graph_task_id()  # noqa: SLF001
        if self._deferred is None or self._backward != backward:
            self._deferred, self._backward = _wide(gradient), backward
            torch.autograd.Variable._execution_engine.queue_callback(self._check_taken)  # noqa: SLF001
        else:
            self._deferred.add_(gradient)

    @torch.no_grad()
    def _take_over(self, whole: torch.Tensor) -> None:
        """Give FSDP2 the sums, and gradients that were computed without an alias."""
        for anchored in (self, *self.anchored):
            anchored.give_deferred()
        gradient = whole.grad
        if gradient is not None and (self.anchored or gradient.dtype in _NARROW):
            whole.grad = None
            self._give(gradient)

    def _check_taken(self) -> None:
        """Raise StowError at the end of a backward that did not reach the weight."""
        if self._deferred is not None:
            self._deferred = None
            message = (
                "micro_batches: a unit that is called several times in a forward stops the gradient"
                " of its input, and gradients of its weights cannot be summed. Leave micro_batches"
                " out, or call the unit once."
            )
            raise StowError(message)

    def give_deferred(self) -> None:
        """Give FSDP2 the deferred sum of this backward."""
        total, self._deferred = self._deferred, None
        if total is not None and self._backward == torch._C._current_graph_task_id():  # noqa: SLF001
            self._give(total)

    def _give(self, gradient: torch.Tensor) -> None:
        sharded = self._sharded()
        if sharded is None:
            return
        if sharded.unsharded_accumulated_grad is None:
            sharded.unsharded_accumulated_grad = _wide(gradient)
        else:
            sharded.unsharded_accumulated_grad.add_(gradient)


class CallSums:
    """The sums of one call of a module."""

    def __init__(self) -> None:
        """Begin without weights."""
        self.by_weight: dict[int, WeightSum] = {}
        """Sums by the ``id`` of the gathered weight."""
        self.kept: list[tuple[torch.Tensor, WeightSum]] = []
        """Weights whose sums are complete only after the backward of all calls of the unit."""
        self.is_anchored = False

    def anchor(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, whose backward autograd runs before it completes the unit's sums."""
        if not self.kept:
            return x
        # The smallest weight: its gradient of zeros takes memory.
        weight, total = min(self.kept, key=lambda pair: pair[0].numel())
        total.anchored = [other for _, other in self.kept if other is not total]
        self.is_anchored = True
        return cast("torch.Tensor", _Anchor.apply(x, weight))  # type: ignore[no-untyped-call]

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def put_aliases(self, module: nn.Module) -> list[Replaced]:
        """Replace the weights of ``module`` by aliases whose gradients are added in fp32.

        Returns the replaced weights.
        """
        aliases: dict[int, torch.Tensor] = {}
        replaced: list[Replaced] = []
        for part in module.modules():
            table: dict[str, Any] = part._parameters  # noqa: SLF001
            for name, weight in table.items():
                if weight is not None and id(weight) in self.by_weight:
                    if id(weight) not in aliases:
                        aliases[id(weight)] = self._alias(weight)
                    table[name] = aliases[id(weight)]
                    replaced.append((table, name, weight))
        return replaced

    def _alias(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a leaf with the memory of ``weight``, whose gradient is added to its sum."""
        alias = weight.detach().requires_grad_()
        total = self.by_weight[id(weight)]
        is_deferred = self.is_anchored and any(total is other for _, other in self.kept)
        hook: Any = alias.register_post_accumulate_grad_hook
        hook(partial(total.add, is_deferred=is_deferred))
        return alias


class _Anchor(torch.autograd.Function):
    """Return the first argument; the second gets a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        ctx.shape = weight.shape
        ctx.dtype = weight.dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        zero = torch.zeros((), dtype=ctx.dtype, device=gradient.device)
        return gradient, zero.expand(ctx.shape)


def _wide(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.float() if gradient.dtype in _NARROW else gradient


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _put_back(replaced: Sequence[Replaced]) -> None:
    """Put the weights back that ``put_aliases`` returned."""
    for table, name, weight in replaced:
        table[name] = weight
    torch.clear_autocast_cache()  # it holds casts of aliases that are not used again
