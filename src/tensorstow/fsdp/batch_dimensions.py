"""Tells which dimension of each tensor that a module takes or returns is the batch.

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
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

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
    """Which dimension of something is the batch cannot be told."""


def batch_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return how many samples a model is called with: dimension 0 of the tensors that it is given.

    Args:
        args: The positional arguments.
        kwargs: The named ones.

    Returns:
        The size of dimension 0 of all tensors, but for those where it is 1.

    Raises:
        OptionError: Tensors differ in it, or there is none, or an object that may hold tensors.
    """
    sizes: dict[int, str] = {}
    for name, leaf in _named_leaves((tuple(args), dict(kwargs))):
        if isinstance(leaf, torch.Tensor):
            if leaf.ndim and leaf.shape[0] > 1:
                sizes.setdefault(leaf.shape[0], name)
        elif not _is_plain(leaf):
            message = (
                f"micro_batches: the model was called with a {type(leaf).__name__} ({name}), and"
                " which of what it holds belongs to which sample cannot be told. Give tensors, or"
                " tuples, lists and dicts of them."
            )
            raise OptionError(message)
    if len(sizes) > 1:
        found = " and ".join(f"{size} ({name})" for size, name in sizes.items())
        message = (
            "micro_batches: dimension 0 of what the model is called with is the batch, and it was"
            f" called with tensors of {found}. Give one batch, and 1 where all samples share."
        )
        raise OptionError(message)
    return next(iter(sizes), 1)


def samples_of(args: Sequence[Any], kwargs: Mapping[str, Any], batch: int, count: int) -> Call:
    """Return arguments with the first ``count`` of ``batch`` samples."""

    def first(leaf: Any) -> Any:  # noqa: ANN401
        is_batched = isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.shape[0] == batch
        return leaf.narrow(0, 0, count) if is_batched else leaf

    return _mapped(first, (tuple(args), dict(kwargs)))


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """The shapes of what one call took and returned, and its plain values."""

    given: Mapping[str, Any]
    returned: Mapping[str, Any]


class ObservedCalls:
    """The calls of modules in one forward, by name."""

    def __init__(self) -> None:
        """Have seen none."""
        self.calls: defaultdict[str, list[ObservedCall]] = defaultdict(list)

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # noqa: SLF001
    def observe(
        self, name: str, forward: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401
        """Return what ``forward`` returns; record the shapes of both."""
        given = _facts((tuple(args), kwargs), "argument")
        output = forward(*args, **kwargs)
        self.calls[name].append(ObservedCall(given, _facts(((output,), {}), "output")))
        return output


@dataclass(frozen=True, slots=True)
class Dimension:
    """Which dimension of a tensor is the batch."""

    batch: int | None
    """None: the tensor belongs to every sample."""
    ndim: int
    ones: frozenset[int]
    """Other dimensions of size 1, which a batch of another kind could be in."""

    def refuses(self, shape: torch.Size) -> bool:
        """Return whether a tensor of ``shape`` is of another kind than what was observed."""
        return len(shape) != self.ndim or any(shape[i] != 1 for i in self.ones)


@dataclass(slots=True)
class BatchDimensions:
    """What is known of the tensors that one module takes and returns."""

    given: dict[str, Dimension] = field(default_factory=dict)
    returned: dict[str, Dimension] = field(default_factory=dict)
    unknown: str = ""
    """What cannot be told; empty: nothing."""
    calls: int = 0
    """How often the module was called in a forward."""

    @classmethod
    def of(
        cls,
        first: Sequence[ObservedCall],
        second: Sequence[ObservedCall],
        sizes: tuple[int, int],
    ) -> "BatchDimensions":
        """Compare the calls of a module in two forwards.

        Args:
            first: Its calls with a batch of ``sizes[0]``.
            second: Those with ``sizes[1]``.
            sizes: Two different sizes of a batch.

        Returns:
            What they tell.
        """
        made = cls(calls=max(len(first), len(second)))
        if len(first) != len(second):
            made.unknown = f"it was called {len(first)} times and {len(second)} times"
        for one, other in zip(first, second, strict=False):
            made._compare(one.given, other.given, sizes, made.given)
            made._compare(one.returned, other.returned, sizes, made.returned)
        if first and all(found.batch is None for found in made.given.values()):
            made.unknown = made.unknown or "it is given no tensor that has the batch"
        if any(found.batch is None for found in made.returned.values()):
            name = next(name for name, found in made.returned.items() if found.batch is None)
            made.unknown = made.unknown or f"it returns a tensor without the batch ({name})"
        return made

    def _compare(
        self,
        one: Mapping[str, Any],
        other: Mapping[str, Any],
        sizes: tuple[int, int],
        known: dict[str, Dimension],
    ) -> None:
        for name in one.keys() & other.keys():
            found = _dimension(one[name], other[name], sizes)
            if isinstance(found, str):
                self.unknown = self.unknown or f"{name} is {found}"
            elif found is not None and known.setdefault(name, found) != found:
                self.unknown = self.unknown or f"{name} differs from call to call"

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def split(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: int,
        before: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[Call]:
        """Divide the arguments of a call into those of ``parts`` calls.

        Args:
            args: The positional arguments.
            kwargs: The named ones.
            parts: How many; they have the same size.
            before: Called with the first tensor of floating point that is cut, of those that need
                a gradient where there are any; cut is what it returns. Default: None, nothing is
                called.

        Returns:
            The arguments of each part, in the order of the samples.

        Raises:
            UnknownBatchError: An argument is of a kind that was not observed.
            OptionError: The batch does not divide by ``parts``.
        """
        leaves, spec = tree_flatten_with_path((tuple(args), dict(kwargs)))
        size = None
        columns: list[list[Any]] = []
        cut: list[tuple[int, torch.Tensor, int]] = []
        for path, leaf in leaves:
            found = self._found(_name_of(path), leaf)
            if found is None or found.batch is None:
                columns.append([leaf] * parts)
                continue
            own = leaf.shape[found.batch]
            size = own if size is None else size
            if own != size:
                message = f"{_name_of(path)} has {own} samples, and another argument has {size}"
                raise UnknownBatchError(message)
            if own % parts:
                message = (
                    f"micro_batches={parts} was given, and {_name_of(path)} has {own} samples: they"
                    " are to divide evenly."
                )
                raise OptionError(message)
            cut.append((len(columns), leaf, found.batch))
            columns.append([])
        if size is None:
            message = "none of its arguments has the batch"
            raise UnknownBatchError(message)
        floats = [at for at, leaf, _ in cut if leaf.is_floating_point()]
        anchored = [at for at, leaf, _ in cut if leaf.requires_grad] or floats
        for at, leaf, dimension in cut:
            whole = before(leaf) if before is not None and at in anchored[:1] else leaf
            columns[at] = list(torch.split(whole, size // parts, dimension))
        calls = [tree_unflatten(list(row), spec) for row in zip(*columns, strict=True)]
        return [(given[0], given[1]) for given in calls]

    def _found(self, name: str, leaf: object) -> Dimension | None:
        """Return what is known of a tensor; None where there is none."""
        if not isinstance(leaf, torch.Tensor):
            if not _is_plain(leaf):
                message = f"{name} is a {type(leaf).__name__}"
                raise UnknownBatchError(message)
            return None
        found = self.given.get(name)
        if found is None or found.refuses(leaf.shape):
            message = f"{name} is of shape {tuple(leaf.shape)}, unlike in the first forward"
            raise UnknownBatchError(message)
        return found

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def concatenate(self, outputs: Sequence[Any]) -> Any:  # noqa: ANN401
        """Return what the module would for the whole batch.

        Args:
            outputs: What it returned for each part, in the order of the samples.

        Returns:
            The same structure, with the samples of all parts.

        Raises:
            OptionError: It returned something that cannot be joined.
        """
        flat = [tree_flatten_with_path(((output,), {})) for output in outputs]
        leaves, spec = flat[0]
        if any(other != spec for _, other in flat[1:]):
            message = "micro_batches: a unit returned other structures for some micro-batches."
            raise OptionError(message)
        joined = []
        for at, (path, leaf) in enumerate(leaves):
            name, values = _name_of(path, "output"), [each[at][1] for each, _ in flat]
            if isinstance(leaf, torch.Tensor):
                found = self.returned.get(name)
                if found is None or found.batch is None or found.refuses(leaf.shape):
                    message = (
                        f"micro_batches: {name} of a unit is of shape {tuple(leaf.shape)}, unlike"
                        " in the first forward: how to join micro-batches cannot be told."
                    )
                    raise OptionError(message)
                joined.append(torch.cat(values, found.batch))
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
    """Return the batch's dimension, why it cannot be told, or None for what is no tensor."""
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


@dataclass(frozen=True, slots=True)
class _Object:
    """Stands for an object that may hold tensors."""

    kind: str


@torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
def _facts(tree: Call, positional: str) -> dict[str, Any]:
    """Return what is kept of each leaf: its shape, its value, or its class."""
    found: dict[str, Any] = {}
    for path, leaf in tree_flatten_with_path(tree)[0]:
        name = _name_of(path, positional)
        if isinstance(leaf, torch.Tensor):
            found[name] = leaf.shape
        else:
            found[name] = leaf if _is_plain(leaf) else _Object(type(leaf).__name__)
    return found


def _is_plain(leaf: object) -> bool:
    return isinstance(leaf, _PLAIN) or callable(leaf)


def _named_leaves(tree: Call) -> list[tuple[str, Any]]:
    return [(_name_of(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def _mapped(change: Callable[[Any], Any], tree: Call) -> Call:
    leaves, spec = tree_flatten_with_path(tree)
    args, kwargs = tree_unflatten([change(leaf) for _, leaf in leaves], spec)
    return args, kwargs


def _name_of(path: Sequence[Any], positional: str = "argument") -> str:
    """Return what errors call a leaf: "argument 0", "attention_mask", "position_embeddings[1]"."""
    kind, place, *rest = path
    name = f"{positional} {place.idx}" if kind.idx == 0 else str(place.key)
    return name + "".join(str(key) for key in rest)
