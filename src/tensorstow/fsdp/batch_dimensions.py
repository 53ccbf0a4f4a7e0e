"""Finds the batch dimension of each tensor that a module takes or returns.

[Note: Two sizes] A tensor of shape (8, 8) does not show which dimension is the batch, or whether
one is. So a model is run with two batches of different sizes, and what its modules take and return
is compared: the dimension that follows the batch is the batch's. A tensor that stays as it is
(position embeddings, a mask of (1, 1, tokens, tokens)) belongs to every sample. Anything else
(tokens of all samples in one dimension, a number that follows the batch, an object that holds
tensors) cannot be divided into samples.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path, tree_map, tree_unflatten

from tensorstow.base.errors import OptionError, StowError

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    slice,
    range,
    Enum,
    type,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments."""


class UnknownBatchError(StowError):
    """The batch dimension of an argument or an output cannot be determined."""


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many samples a model is called with: dimension 0 of its tensors, unless it is 1.

    Raises OptionError if sizes differ, or if an argument is an object that may hold tensors.
    """
    sizes: dict[int, str] = {}
    for path, leaf in tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        name = _name_of(path)
        if isinstance(leaf, torch.Tensor):
            if leaf.ndim and leaf.shape[0] > 1:
                sizes.setdefault(leaf.shape[0], name)
        elif not _is_plain(leaf):
            message = (
                f"micro_batches: the model was called with a {type(leaf).__name__} ({name}), and"
                " an object of that class cannot be divided into samples. Give tensors, or"
                " tuples, lists and dicts of them."
            )
            raise OptionError(message)
    if len(sizes) > 1:
        shapes = " and ".join(f"{size} ({name})" for size, name in sizes.items())
        message = (
            "micro_batches: dimension 0 of what the model is called with is the batch, and it was"
            f" called with tensors of {shapes}. Give one batch, and 1 where all samples share."
        )
        raise OptionError(message)
    return next(iter(sizes), 1)


def samples_of(args: Sequence[Any], kwargs: Mapping[str, Any], batch: int, count: int) -> Call:
    """Return arguments with the first ``count`` of ``batch`` samples."""

    def first(leaf: Any) -> Any:  # noqa: ANN401
        is_batched = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == batch
        return leaf.narrow(0, 0, count) if is_batched else leaf

    call: Call = tree_map(first, (tuple(args), dict(kwargs)))
    return call


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """The shapes and plain values of the arguments and outputs of one call."""

    arguments: Mapping[str, Any]
    returned: Mapping[str, Any]


class ObservedCalls:
    """The calls of modules in one forward, by name."""

    def __init__(self) -> None:
        """Begin without calls."""
        self.calls: defaultdict[str, list[ObservedCall]] = defaultdict(list)

    # Dynamo may compile the forward that is called here, and not the recording around it.
    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # noqa: SLF001
    def observe(
        self, name: str, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Return what ``forward`` returns; record the shapes of both."""
        arguments = _facts((tuple(args), kwargs), "argument")
        output = forward(*args, **kwargs)
        self.calls[name].append(ObservedCall(arguments, _facts(((output,), {}), "output")))
        return output


@dataclass(frozen=True, slots=True)
class Dimension:
    """Which dimension of a tensor is the batch."""

    batch: int | None
    """None: the tensor belongs to every sample."""
    ndim: int
    ones: frozenset[int]
    """Other dimensions of size 1, which could be the batch of a tensor of another kind."""

    def refuses(self, shape: torch.Size) -> bool:
        """Return whether a tensor of ``shape`` does not match the observed one."""
        return len(shape) != self.ndim or any(shape[i] != 1 for i in self.ones)


@dataclass(slots=True)
class BatchDimensions:
    """The batch dimensions of the tensors that one module takes and returns."""

    arguments: dict[str, Dimension] = field(default_factory=dict)
    returned: dict[str, Dimension] = field(default_factory=dict)
    unknown: str = ""
    """Why a dimension cannot be determined; empty: all are."""
    calls: int = 0
    """How often the module was called in a forward."""

    @classmethod
    def of(
        cls,
        first: Sequence[ObservedCall],
        second: Sequence[ObservedCall],
        sizes: tuple[int, int],
    ) -> "BatchDimensions":
        """Compare the calls of a module with a batch of ``sizes[0]`` and with one of ``sizes[1]``.

        Returns the dimensions, or the reason that they are unknown.
        """
        observed = cls(calls=max(len(first), len(second)))
        if len(first) != len(second):
            observed.unknown = f"it was called {len(first)} times and {len(second)} times"
        # ``unknown`` names a difference in the number of calls: compare those that both runs have.
        for one, other in zip(first, second, strict=False):
            observed._compare(one.arguments, other.arguments, sizes, observed.arguments)
            observed._compare(one.returned, other.returned, sizes, observed.returned)
        if first and all(dimension.batch is None for dimension in observed.arguments.values()):
            observed.unknown = observed.unknown or "it is given no tensor that has the batch"
        whole = next((n for n, dim in observed.returned.items() if dim.batch is None), None)
        if whole is not None:
            observed.unknown = (
                observed.unknown or f"it returns a tensor without the batch ({whole})"
            )
        return observed

    def _compare(
        self,
        one: Mapping[str, Any],
        other: Mapping[str, Any],
        sizes: tuple[int, int],
        dimensions: dict[str, Dimension],
    ) -> None:
        for name in one.keys() & other.keys():
            dimension = _dimension(one[name], other[name], sizes)
            if isinstance(dimension, str):
                self.unknown = self.unknown or f"{name} is {dimension}"
            elif dimension is not None and dimensions.setdefault(name, dimension) != dimension:
                self.unknown = self.unknown or f"{name} differs from call to call"

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def split(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: int,
        before: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[Call]:
        """Divide the arguments of a call into those of ``parts`` calls, in order of the samples.

        ``before`` is called with the first tensor of floating point that is cut, or with the first
        that needs a gradient if any does. Its result is cut instead.

        Raises:
            UnknownBatchError: An argument is of a kind that was not observed.
            OptionError: The batch does not divide by ``parts``.
        """
        leaves, spec = tree_flatten_with_path((tuple(args), dict(kwargs)))
        size = None
        columns: list[list[Any]] = []
        cut: list[tuple[int, torch.Tensor, int]] = []
        # Find what is cut, and where; every part gets the other arguments as they are.
        for path, leaf in leaves:
            dimension = self._dimension_of(_name_of(path), leaf)
            if dimension is None or dimension.batch is None:
                columns.append([leaf] * parts)
                continue
            samples = leaf.shape[dimension.batch]
            size = samples if size is None else size
            if samples != size:
                message = f"{_name_of(path)} has {samples} samples, and another argument has {size}"
                raise UnknownBatchError(message)
            if samples % parts:
                name = _name_of(path)
                message = (
                    f"micro_batches={parts} was given, and {name} has {samples} samples: they"
                    " are to divide evenly."
                )
                raise OptionError(message)
            cut.append((len(columns), leaf, dimension.batch))
            columns.append([])
        if size is None:
            message = "none of its arguments has the batch"
            raise UnknownBatchError(message)
        # Cut the tensors, the anchored one after ``before`` has replaced it.
        floats = [at for at, leaf, _ in cut if leaf.is_floating_point()]
        anchored = [at for at, leaf, _ in cut if leaf.requires_grad] or floats
        for at, leaf, batch in cut:
            whole = before(leaf) if before is not None and at in anchored[:1] else leaf
            columns[at] = [_as_allocated(p) for p in torch.split(whole, size // parts, batch)]
        calls = [tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]
        return [(call_args, call_kwargs) for call_args, call_kwargs in calls]

    def _dimension_of(self, name: str, leaf: object) -> Dimension | None:
        """Return the batch dimension of an argument; None if it is not a tensor."""
        if not isinstance(leaf, torch.Tensor):
            if not _is_plain(leaf):
                message = f"{name} is a {type(leaf).__name__}"
                raise UnknownBatchError(message)
            return None
        dimension = self.arguments.get(name)
        if dimension is None or dimension.refuses(leaf.shape):
            message = f"{name} is of shape {tuple(leaf.shape)}, unlike in the first forward"
            raise UnknownBatchError(message)
        return dimension

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def concatenate(self, outputs: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return the output that the module would return for the whole batch.

        ``outputs`` are those of the parts, in the order of the samples. Raises OptionError if one
        cannot be joined.
        """
        flat = [tree_flatten_with_path(((output,), {})) for output in outputs]
        leaves, spec = flat[0]
        if any(other != spec for _, other in flat[1:]):
            message = "micro_batches: a unit returned other structures for some micro-batches."
            raise OptionError(message)
        joined = []
        for at, (path, leaf) in enumerate(leaves):
            name, values = _name_of(path, "output"), [part[at][1] for part, _ in flat]
            if isinstance(leaf, torch.Tensor):
                dimension = self.returned.get(name)
                if dimension is None or dimension.batch is None or dimension.refuses(leaf.shape):
                    message = (
                        f"micro_batches: {name} of a unit is of shape {tuple(leaf.shape)}, unlike"
                        " in the first forward: micro-batches cannot be joined."
                    )
                    raise OptionError(message)
                for value in values:
                    if value.requires_grad:  # its gradient is a part of the batch's
                        value.register_hook(_as_allocated)
                joined.append(torch.cat(values, dimension.batch))
            elif not _is_plain(leaf) or any(value != leaf for value in values):
                message = (
                    f"micro_batches: {name} of a unit differs from micro-batch to micro-batch, or"
                    f" is an object (a {type(leaf).__name__}): it cannot be joined."
                )
                raise OptionError(message)
            else:
                joined.append(leaf)
        output: Any = tree_unflatten(joined, spec)[0][0]
        return output


def _dimension(one: Any, other: Any, sizes: tuple[int, int]) -> Dimension | str | None:  # noqa: ANN401
    """Return the batch dimension, why it is unknown, or None for a value that is not a tensor."""
    if not isinstance(one, torch.Size) or not isinstance(other, torch.Size):
        if isinstance(one, torch.Size) or isinstance(other, torch.Size):
            return None  # a tensor in one forward alone: not observed
        if isinstance(one, _Object):
            return f"an object, a {one.kind}"
        return None if one == other else f"{one!r} with one batch and {other!r} with another"
    ndim = len(one)
    differing = [i for i in range(ndim) if len(other) == ndim and one[i] != other[i]]
    if len(other) != ndim or len(differing) > 1:
        return f"of shape {tuple(one)} with one batch, and {tuple(other)} with another"
    batch = differing[0] if differing else None
    if batch is not None and (one[batch], other[batch]) != sizes:
        return (
            f"of shape {tuple(one)} for {sizes[0]} samples and {tuple(other)} for {sizes[1]}:"
            " samples share a dimension with something else"
        )
    return Dimension(batch, ndim, frozenset(i for i in range(ndim) if one[i] == 1 and i != batch))


def _as_allocated(part: torch.Tensor) -> torch.Tensor:
    """Return a part of a batch at an address like those that torch allocates.

    Libraries choose kernels by addresses, and a micro-batch by itself has memory of its own.
    """
    # torch's allocator on the CPU aligns to 64 bytes.
    return part.clone() if part.data_ptr() % 64 else part


@dataclass(frozen=True, slots=True)
class _Object:
    """Stands for an object that may hold tensors."""

    kind: str


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _facts(tree: Call, positional: str) -> dict[str, Any]:
    """Return the shape, the value or the class of each leaf, by name."""
    facts: dict[str, Any] = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        name = _name_of(path, positional)
        if isinstance(leaf, torch.Tensor):
            facts[name] = leaf.shape
        else:
            facts[name] = leaf if _is_plain(leaf) else _Object(type(leaf).__name__)
    return facts


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, _PLAIN) or callable(leaf)


def _name_of(path: Sequence[Any], positional: str = "argument") -> str:
    """Return what errors call a leaf: "argument 0", "attention_mask", "position_embeddings[1]"."""
    kind, place, *rest = path
    name = f"{positional} {place.idx}" if kind.idx == 0 else str(place.key)
    return name + "".join(str(key) for key in rest)
