"""A parameter without memory: FSDP2's public extension asks it for its bytes when it gathers them.

[Note: What FSDP2 does to it] At ``fully_shard`` it splits the parameter, pads the shard and takes
views; nothing of that needs bytes, so until it has a cell every operation is arithmetic over
shapes. From then on ``fsdp_pre_all_gather`` hands out the cell's bytes, and whoever else reads or
writes the parameter (``state_dict``, ``load_state_dict``, ``full_tensor``) does so with the cell.
A view of it (a row, its transpose) has no memory either: the view is taken anew from the cell's
bytes whenever it is read or written, so that what is written to a part is in the parameter.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from tensorstow.base.errors import PoisonedError
from tensorstow.fsdp.shard_storage import Cell
from tensorstow.fsdp.single_rank import Tenure
from tensorstow.fsdp.uploads import Uploads
from tensorstow.io.buffer_pool import Shelf

_SAME = frozenset({torch.ops.aten.detach.default, torch.ops.aten.alias.default})
_NEW = torch.ops.aten.new_zeros.default
_View = Callable[[torch.Tensor], torch.Tensor]
_PADDING = frozenset({_NEW, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default})


class Slot:
    """Where all tensors that are made of one parameter find its cell."""

    __slots__ = ("cell", "tenure", "uploads")

    def __init__(self) -> None:
        """Be empty, as while FSDP2 shards the parameter."""
        self.cell: Cell | None = None
        self.tenure: Tenure | None = None
        """Where the weight may be computed with in its own memory."""
        self.uploads: Uploads | None = None
        """What takes the weight to an accelerator."""

    def filled(self) -> Cell:
        """Return the cell; raise PoisonedError where there is none."""
        if self.cell is None:
            message = "A parameter was read before it had bytes: stow() did not end."
            raise PoisonedError(message)
        return self.cell


class StowedParameter(torch.Tensor):
    """A shard of a parameter, of which FSDP2 knows shape, dtype and device alone."""

    slot: Slot
    view_of: "tuple[StowedParameter, _View] | None"
    """What this is a view of, and which; None: the shard itself, or all that is padded."""

    @staticmethod
    def __new__(cls: type[Self], like: torch.Tensor, device: torch.device, slot: Slot) -> Self:  # noqa: D102
        tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, like.stride(), dtype=like.dtype, device=device
        )
        tensor.slot, tensor.view_of = slot, None
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        """Say what it is, without its bytes."""
        return f"StowedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def home(self) -> torch.Tensor:
        """This rank's elements in host memory."""
        return self.slot.filled().home

    @property
    def lessor(self) -> Shelf | None:
        """Who lends ``home`` its memory, where it has none of its own."""
        return self.slot.filled().lessor

    def fsdp_pre_all_gather(
        self,
        mesh: Any,  # noqa: ANN401  # torch's own signature, all five
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,  # noqa: ANN401
    ) -> tuple[tuple[torch.Tensor, ...], Tenure | None]:
        """Return what this rank gives to the all-gather: its padded shard, cast, or nothing.

        The second tells that of one rank, which computes with the shard itself: see one_rank.
        """
        del mesh, outer_size, outer_stride, module
        dtype = mp_policy.param_dtype or self.dtype
        tenure = self.slot.tenure
        if tenure is not None and dtype == self.dtype:
            tenure.begin()
            return (torch.empty(0, dtype=dtype, device=self.device),), tenure
        cell = self.slot.filled()
        if self.slot.uploads is not None:
            return (self.slot.uploads.take(cell, dtype),), None
        given = cell.open_to_copy().to(self.device, dtype)
        cell.bytes_up += given.nbytes
        return (given,), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Tenure | None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the gathered parameter and the memory that is freed with it."""
        del param_dtype
        cell = self.slot.filled()
        if metadata is not None:
            return None if out is not None else (metadata.weight, (metadata,))
        if self.slot.uploads is not None:
            self.slot.uploads.used(cell)
        else:
            cell.copied()
        (gathered,) = all_gather_outputs
        return None if out is not None else (gathered, (gathered,))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Do arithmetic over shapes while there are no bytes, and else run ``func`` on them."""
        first = args[0] if isinstance(args[0], cls) else None
        if first is not None and func in _SAME:
            same = cls(first, first.device, first.slot)
            same.view_of = first.view_of
            return same
        if first is not None and first.slot.cell is None:
            return first.on_shape(func, args, kwargs or {})
        if first is not None and first.is_padded_again(func, args):
            return first.on_shape(func, args, kwargs or {})
        if first is not None and func.is_view:
            return first.seen_as(func, args[1:], kwargs or {})
        return _on_bytes(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:  # noqa: ANN401  # torch's own signature
        """Return a copy of the elements, as an array."""
        return _plain(self).numpy(force=force)

    def tolist(self) -> Any:  # noqa: ANN401  # torch's own signature
        """Return the elements as a list."""
        return _plain(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  # torch's own signature
        """Save a copy of the elements, as a tensor of torch's own."""
        reduce: Callable[[Any], Any] = _plain(self).__reduce_ex__
        return reduce(protocol)

    @property
    def held(self) -> torch.Tensor:
        """The elements where they live, to be used while the cell is open."""
        if self.view_of is not None:
            parent, view = self.view_of
            return view(parent.held)
        cell = self.slot.filled()
        whole = cell.padded if self.shape == cell.padded.shape else cell.home
        return whole.view(self.shape)

    def seen_as(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
        """Return the view, or the several, that ``func`` takes of this."""
        like = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")
        numbers = count()

        def wrap(value: Any) -> Any:  # noqa: ANN401
            if not isinstance(value, torch.Tensor):
                return value
            number = next(numbers)

            def view(held: torch.Tensor) -> torch.Tensor:
                seen = func(held, *args, **kwargs)
                found: torch.Tensor = seen if isinstance(seen, torch.Tensor) else seen[number]
                return found

            wrapped = StowedParameter(value, self.device, self.slot)
            wrapped.view_of = self, view
            return wrapped

        return tree_map(wrap, func(like, *args, **kwargs))

    def is_padded_again(self, func: Any, args: Sequence[Any]) -> bool:  # noqa: ANN401
        """Return whether this is FSDP2, which pads shards anew at the first forward."""
        if self.view_of is not None:
            return False
        cell = self.slot.filled()
        whole = {cell.padded.shape, cell.home.shape}
        if func == torch.ops.aten.copy_.default:
            return isinstance(args[1], StowedParameter) and args[1].slot is self.slot
        if func not in _PADDING or self.shape not in whole:
            return False
        if func == _NEW and torch.Size(args[1]) == self.shape:
            return False  # zeros of its own shape are somebody else's: here is nothing to pad
        out = func(torch.empty(self.shape, device="meta"), *args[1:])
        return out.shape in whole or out.shape == (cell.padded.numel(),)

    def on_shape(
        self,
        func: Any,  # noqa: ANN401
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401
        """Return what ``func`` would, without bytes."""

        def shape_of(value: Any) -> Any:  # noqa: ANN401
            if not isinstance(value, StowedParameter):
                return value
            return torch.empty(value.shape, dtype=value.dtype, device="meta")

        given = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
        out = func(*tree_map(shape_of, args), **given)
        if func == torch.ops.aten.copy_.default:
            return self

        def wrap(value: Any) -> Any:  # noqa: ANN401
            if not isinstance(value, torch.Tensor):
                return value
            return StowedParameter(value, self.device, self.slot)

        return tree_map(wrap, out)


@torch.no_grad()
def cell_of(parameter: torch.Tensor) -> Cell | None:
    """Return the cell of a parameter, sharded or its shard; None where it has memory of its own."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.slot.cell if isinstance(local, StowedParameter) else None


@torch.no_grad()
def _plain(parameter: StowedParameter) -> torch.Tensor:
    """Return a copy of the elements, a tensor of torch's own."""
    return torch.clone(parameter)


def _on_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Run ``func`` on host memory in place of stowed parameters.

    Those that ``func`` writes are written. What comes out has memory of its own.
    """
    written = {id(p.slot.filled()): p for p in _written(func, args, kwargs)}
    cells: dict[int, Cell] = {}

    def bytes_of(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, StowedParameter):
            return value
        cell = value.slot.filled()
        cells[id(cell)] = cell
        return value.held

    given, named = tree_map(bytes_of, args), tree_map(bytes_of, kwargs)
    with ExitStack() as opened:
        for key, cell in cells.items():
            opened.enter_context(cell.opened(to_change=key in written))
        out = func(*given, **named)
        for parameter in written.values():  # what runs in here does not count as a version
            torch.autograd.graph.increment_version(parameter.home)
        storages = {cell.padded.untyped_storage().data_ptr() for cell in cells.values()}

        def own(value: Any) -> Any:  # noqa: ANN401
            if not isinstance(value, torch.Tensor):
                return value
            return value.clone() if value.untyped_storage().data_ptr() in storages else value

        target = kwargs.get("out", args[0] if args else None)
        is_written = isinstance(target, StowedParameter) and id(target.slot.cell) in written
        return target if is_written and out is not None else tree_map(own, out)


def _written(
    func: Any,  # noqa: ANN401
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> list[StowedParameter]:
    """Return the stowed parameters that ``func`` writes: its first, ``out=``, or those in lists."""
    asked = func._schema.arguments  # noqa: SLF001  # nothing public tells
    places = [kwargs.get(a.name, args[i] if i < len(args) else None) for i, a in enumerate(asked)]
    changes = [a.alias_info is not None and a.alias_info.is_write for a in asked]
    values = tree_flatten([place for place, c in zip(places, changes, strict=True) if c])[0]
    return [value for value in values if isinstance(value, StowedParameter)]
