"""Separates the states of a parameter: large tensors go to disk, the rest stays in RAM.

An entry is ``optimizer.state[parameter]``: tensors, numbers, and containers of them, by name. A
value that holds a large tensor goes to disk as a whole; its small parts (a count next to a
matrix) are kept with the tensor's place.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.sizes import round_up
from tensorstow.io.arena import TENSOR_ALIGN
from tensorstow.io.files import ALIGN

LARGE_BYTES = 16 << 10
"""A tensor of fewer bytes stays in RAM: a disk's latency would exceed the time of the copy."""

_STAGGERED_BYTES = 1 << 20
_STAGGER = 3 * 4096


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """The place of a tensor in its piece's bytes, its dtype, shape and strides."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Return its bytes, padding excluded."""
        return prod(self.shape) * self.dtype.itemsize

    def view(self, region: torch.Tensor) -> torch.Tensor:
        """Return the tensor, in the bytes of ``region``."""
        flat = region[self.offset : self.offset + self.nbytes].view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


@dataclass(slots=True)
class PackedEntry:
    """An entry of ``optimizer.state``, split into the part on disk and the rest."""

    resident: dict[str, Any] = field(default_factory=dict)
    """What stays in RAM, as it was."""
    stowed: dict[str, Any] = field(default_factory=dict)
    """What goes to disk: values with a Slot where each large tensor was."""
    tensors: list[tuple[TensorSlot, torch.Tensor]] = field(default_factory=list)

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        """Return the places, in order."""
        return tuple(slot for slot, _ in self.tensors)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the run that the piece needs, whole blocks of a file."""
        if not self.tensors:
            return 0
        last = self.tensors[-1][0]
        return round_up(last.offset + last.nbytes, ALIGN)

    def copied(self) -> "PackedEntry":
        """Return the same with tensors of its own."""
        copies = [(slot, tensor.clone()) for slot, tensor in self.tensors]
        return PackedEntry(self.resident, self.stowed, copies)


def pack(entry: Mapping[str, Any], least: int = LARGE_BYTES) -> PackedEntry:
    """Split ``entry``; tensors of ``least`` bytes and more get consecutive slots.

    Raises DTypeError for a large tensor that is not one run of bytes in host memory.
    """
    packed = PackedEntry()
    end = 0

    def put(leaf: object) -> object:
        nonlocal end
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or _bytes(leaf) < least:
            return leaf
        _refuse_layout(leaf)
        slot = TensorSlot(end, leaf.dtype, tuple(leaf.shape), leaf.stride())
        # Streams of one update must not sit a power of two apart, which large ones would.
        end += round_up(slot.nbytes, TENSOR_ALIGN)
        end += _STAGGER if slot.nbytes >= _STAGGERED_BYTES else 0
        packed.tensors.append((slot, leaf))
        return slot

    for name, value in entry.items():
        before = len(packed.tensors)
        changed = map_leaves(value, put)
        target = packed.resident if len(packed.tensors) == before else packed.stowed
        target[name] = changed
    return packed


def unpack(stowed: Mapping[str, Any], region: torch.Tensor) -> dict[str, Any]:
    """Return the stowed values, with tensors as views of ``region``."""

    def find(leaf: object) -> object:
        return leaf.view(region) if isinstance(leaf, TensorSlot) else leaf

    return {name: map_leaves(value, find) for name, value in stowed.items()}


def map_leaves(value: Any, change: Callable[[object], object]) -> Any:  # noqa: ANN401
    """Return ``value`` with ``change`` applied to everything in it that is not a container."""
    if isinstance(value, dict):
        return {key: map_leaves(item, change) for key, item in value.items()}
    # A named tuple takes its items one by one.
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(item, change) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_leaves(item, change) for item in value)
    return change(value)


def tensors_in(value: object) -> list[torch.Tensor]:
    """Return every tensor in ``value``, however deep in containers."""
    tensors: list[torch.Tensor] = []

    def note(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        return leaf

    map_leaves(value, note)
    return tensors


def cloned(value: Any) -> Any:  # noqa: ANN401
    """Return ``value`` with a copy of each tensor in it."""
    return map_leaves(value, lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def refuse_aliases(
    tensors: Iterable[torch.Tensor], parameter: torch.Tensor, where: str, advice: str
) -> None:
    """Raise OptionError if one of ``tensors``, states of ``parameter``, shares memory.

    That is with another, the parameter or its gradient: each would be a copy ``where`` they go,
    and an update of one would not change the other.
    """
    outside = [parameter] if parameter.grad is None else [parameter, parameter.grad]
    seen = {tensor.untyped_storage().data_ptr() for tensor in outside}
    for tensor in tensors:
        address = tensor.untyped_storage().data_ptr()
        if address in seen:
            message = (
                "A state of a parameter shares memory with another, or with the parameter or"
                f" gradient itself: copies {where} would diverge. Let the optimizer clone it, or"
                f" {advice}."
            )
            raise OptionError(message)
        seen.add(address)


def refuse_unsliced(entry: Mapping[str, Any], numel: int) -> None:
    """Raise OptionError unless each state of a slice is a number, or a tensor as long as it."""
    for name, value in entry.items():
        tensors = [tensor for tensor in tensors_in(value) if tensor.dim()]
        if tensors and (tensors[0] is not value or tuple(value.shape) != (numel,)):
            message = (
                f"The state {name!r} of a slice of {numel} elements is not one tensor of as many:"
                " the class is not elementwise. Leave elementwise out."
            )
            raise OptionError(message)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # sparse tensors have no nbytes


def _refuse_layout(tensor: torch.Tensor) -> None:
    # States that are predicted are on the meta device.
    if tensor.device.type not in {"cpu", "meta"} or tensor.layout != torch.strided:
        form = f"{tensor.layout} on {tensor.device}"
    elif _is_one_run(tensor):
        return
    else:
        form = f"of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
    message = (
        f"A state {form} was to go to disk: only tensors that fill one run of host memory can."
        ' Let the optimizer keep a contiguous one, or keep states="host".'
    )
    raise DTypeError(message)


def _is_one_run(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        # The stride of a dimension of one element says nothing.
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
