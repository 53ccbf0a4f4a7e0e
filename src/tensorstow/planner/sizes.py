"""The sizes of a model's units, as one rank's share."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Protocol, Self

import torch

from tensorstow.base.sizes import round_up
from tensorstow.io.files import ALIGN
from tensorstow.planner.bounds import MIN_UNITS_IN_MEMORY, SHARD_ALIGN
from tensorstow.tensors.dtensor import rows_per_rank

_NO_CODES: Mapping[str, int] = MappingProxyType({})


class HasParameters(Protocol):
    """A unit: its name, and its parameters by name; they may be on the meta device."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def parameters(self) -> Mapping[str, torch.nn.Parameter]: ...  # noqa: D102


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Parameters that are unsharded together."""

    name: str
    whole_bytes: int
    """Bytes over all ranks, which are unsharded at once."""
    share_bytes: int
    """Bytes of one rank's shards, with the padding that makes all shards equal."""
    trained: tuple[tuple[torch.dtype, int], ...]
    """Dtype and this rank's elements of each trained parameter."""
    trained_share_bytes: int = field(default=-1, compare=False)
    """Bytes of one rank's shards of trained parameters, padded; -1: without padding."""
    coded_bytes: int = 0
    """Bytes that one rank reads of frozen weights that files have as codes."""
    decoded_bytes: int = 0
    """Bytes of their values, which ``share_bytes`` has."""
    # The fields below follow from ``trained``. The search reads them for each plan that it tries.
    by_dtype: Mapping[torch.dtype, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    """This rank's elements of each trained parameter, by dtype."""
    trained_elements: int = field(init=False, repr=False, compare=False)
    """How many elements of this rank's share are trained."""
    gradient_bytes: int = field(init=False, repr=False, compare=False)
    """The bytes of the gradients of this rank's share."""

    def __post_init__(self) -> None:
        by_dtype: dict[torch.dtype, list[int]] = {}
        for dtype, elements in self.trained:
            by_dtype.setdefault(dtype, []).append(elements)
        sums = {dtype: sum(counts) for dtype, counts in by_dtype.items()}
        object.__setattr__(self, "by_dtype", {d: tuple(n) for d, n in by_dtype.items()})
        object.__setattr__(self, "trained_elements", sum(sums.values()))
        nbytes = sum(dtype.itemsize * n for dtype, n in sums.items())
        object.__setattr__(self, "gradient_bytes", nbytes)
        if self.trained_share_bytes < 0:
            object.__setattr__(self, "trained_share_bytes", nbytes)

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of one rank's shards, with codes in place of their values."""
        return self.share_bytes - self.decoded_bytes + self.coded_bytes

    @property
    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers that the unit is read to: codes, and all values."""
        return self.share_bytes + self.coded_bytes

    @classmethod
    def of(cls, unit: HasParameters, ranks: int, codes: Mapping[str, int] = _NO_CODES) -> Self:
        """Return the sizes of a unit that is sharded over ``ranks``.

        ``codes``: the bytes that one rank reads of weights that are stored as codes, by name.
        """
        parameters = list(unit.parameters.values())
        coded = {name: p for name, p in unit.parameters.items() if name in codes}
        return cls(
            unit.name,
            sum(p.numel() * p.element_size() for p in parameters),
            sum(padded_bytes(p, ranks) for p in parameters),
            tuple((p.dtype, p.numel() // ranks) for p in parameters if p.requires_grad),
            sum(padded_bytes(p, ranks) for p in parameters if p.requires_grad),
            sum(codes[name] for name in coded),
            sum(padded_bytes(p, ranks) for p in coded.values()),
        )


@dataclass(frozen=True, slots=True)
class Sizes:
    """The units of a model, and the number of ranks that shard them."""

    units: tuple[UnitSizes, ...]
    ranks: int = 1
    dtype: torch.dtype | None = field(default=None, compare=False)
    """The dtype of most elements, in which a model computes; None: that of the first trained."""

    @classmethod
    def of(
        cls, units: Sequence[HasParameters], ranks: int, codes: Mapping[str, int] = _NO_CODES
    ) -> Self:
        """Return the sizes of a model; ``codes``: as of ``UnitSizes.of``."""
        elements: dict[torch.dtype, int] = {}
        for parameter in (p for unit in units for p in unit.parameters.values()):
            if parameter.is_floating_point():
                elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
        most = max(elements, key=lambda dtype: elements[dtype], default=None)
        return cls(tuple(UnitSizes.of(unit, ranks, codes) for unit in units), ranks, most)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Return the dtype of products: adapters may be fp32 in a model that computes in bf16."""
        return self.dtype or next((dtype for dtype, _ in self.trained), torch.float32)

    @property
    def whole_bytes(self) -> int:
        """Return the bytes of all ranks' parameters together."""
        return sum(unit.whole_bytes for unit in self.units)

    @property
    def share_bytes(self) -> int:
        """Return the bytes of this rank's parameters, padded."""
        return sum(unit.share_bytes for unit in self.units)

    @property
    def gradient_bytes(self) -> int:
        """Return the bytes of this rank's gradients."""
        return sum(unit.gradient_bytes for unit in self.units)

    @property
    def trained(self) -> list[tuple[torch.dtype, int]]:
        """Return dtype and elements of each trained parameter of this rank, in order."""
        return [parameter for unit in self.units for parameter in unit.trained]


def padded_bytes(parameter: torch.Tensor, ranks: int) -> int:
    """Return the bytes of one rank's padded shard of a parameter, of which ranks share the rows."""
    shape = parameter.shape or (1,)
    elements = rows_per_rank(shape[0], ranks) * math.prod(shape[1:])
    return round_up(elements * parameter.element_size(), SHARD_ALIGN)


def bytes_around(units: Sequence[UnitSizes]) -> int:
    """Return this rank's bytes of the largest unit that contains other units, as tiles.

    It is in memory while they are used. The root, which contains all, counts as one of the units.
    """
    parents = {parent for unit in units for parent in _parents(unit.name)}
    return max((unit.share_bytes for unit in units if unit.name in parents), default=0)


@lru_cache(maxsize=4096)
def _parents(name: str) -> tuple[str, ...]:
    return tuple(name[:at] for at, letter in enumerate(name) if letter == ".")


def least_in_memory(units: Iterable[int], around: int = 0) -> int:
    """Return the host memory, in bytes, that units on disk need at least while they are used.

    ``units``: the padded bytes of each, of one rank; ``around``: the result of ``bytes_around``.
    """
    largest = sorted(units)[-MIN_UNITS_IN_MEMORY:]
    return sum(largest) + MIN_UNITS_IN_MEMORY * ALIGN + round_up(around, ALIGN)


def most_in_memory(units: Sequence[int], prefetch: int, around: int = 0) -> int:
    """Return the default host memory for buffers of units on disk, of which some are read ahead."""
    return least_in_memory(units, around) + prefetch * max(units, default=0)
