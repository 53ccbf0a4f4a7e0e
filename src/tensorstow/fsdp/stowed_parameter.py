"""A sharded parameter without memory, which provides its bytes at each all-gather of FSDP2.

[Note: What FSDP2 does to it] In ``fully_shard`` it splits the parameter, pads the shard and takes
views. None of that needs bytes, so until the storage ``is_sharded`` every operation computes shapes
alone. From then on ``fsdp_pre_all_gather`` returns the bytes, and other reads and writes
(``state_dict``, ``load_state_dict``, ``full_tensor``) use the storage. A view (a row, say) has no
memory either: it is taken from the storage at each read or write, so that a write to a part changes
the parameter.

[Note: Single rank] If a parameter is sharded over one rank, FSDP2 still copies each weight
before use and each gradient twice after it. None of that is needed on the CPU in a weight's own
dtype. ``fsdp_post_all_gather`` returns the unsharded weight to FSDP2 and the tensors to free with
it; FSDP2 frees a tensor by resizing its storage to 0. Here it returns the shard's own memory as the
weight, and an ``UnshardedAlias`` to free: resizing that pins and unpins the shard. A forward that
writes to its weight (clamps it, say) writes to the shard itself, which its version counter shows.

[Note: Versions] Memory that is freed so keeps its address: a graph that still needs the weight
would read other bytes, where FSDP2's own storage of 0 bytes raises an error. Autograd compares the
version of what it saved, and the weight has a version counter of its own: another number while it
is freed, the one before when it is unsharded again, and one more for each write in between.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, Self

import torch
from torch import nn
from torch.utils._pytree import tree_map

from tensorstow.fsdp.h2d_prefetch import H2DPrefetcher
from tensorstow.fsdp.shard_storage import ShardStorage
from tensorstow.memory.buffer_pool import PooledBuffer
from tensorstow.tensors.dtensor import OffloadedWeight, to_local
from tensorstow.tensors.placeholder import ALIASES, Placeholder, written_arguments

_NEW_ZEROS = torch.ops.aten.new_zeros.default
_PADDING = frozenset({_NEW_ZEROS, torch.ops.aten.slice.Tensor, torch.ops.aten.view.default})
_FREED = 1 << 20
"""Versions that a freed weight is ahead of what any graph has saved."""
_set_versions: Any = torch._C._autograd._unsafe_set_version_counter  # noqa: SLF001  # as FSDP2 does
_View = Callable[[torch.Tensor], torch.Tensor]


class UnshardedAlias(Placeholder):
    """Stand-in for the storage of an unsharded weight; ``resize_(0)`` unpins the shard.

    It has the weight's shape and dtype and no memory.
    """

    _storage: "_AliasStorage"

    @staticmethod
    def __new__(cls: type[Self], shard: ShardStorage) -> Self:
        """Make an alias of ``shard``, which is not pinned yet."""
        tensor = Placeholder.__new__(cls, shard.padded)
        tensor._storage = _AliasStorage(shard)  # noqa: SLF001  # its own
        return tensor

    def untyped_storage(self) -> "_AliasStorage":  # type: ignore[override]
        """Return what FSDP2 resizes."""
        return self._storage

    def pin(self) -> None:
        """Return when the newest weight is in memory, where it stays until FSDP2 frees it."""
        self._storage.resize_(self._storage.nbytes_when_pinned)

    @property
    def weight(self) -> torch.Tensor:
        """The padded weight, to be used while it is pinned."""
        return self._storage.weight


class _AliasStorage:
    """A storage as FSDP2 sees it: all bytes of a weight, or none."""

    def __init__(self, shard: ShardStorage) -> None:
        self._shard = shard
        self._is_pinned = False
        self.weight = shard.padded.data
        """The same memory with another version counter."""
        self._version = 0
        """The weight's version when it was last pinned or unpinned."""
        self._shard_version = shard.padded._version  # noqa: SLF001  # no public way
        """The shard's version when it was last unpinned."""
        self.nbytes_when_pinned = shard.padded.nbytes
        _set_versions((self.weight,), (_FREED,))

    def size(self) -> int:
        """Return the bytes that are in memory for sure."""
        return self.nbytes_when_pinned if self._is_pinned else 0

    def resize_(self, nbytes: int) -> None:
        """Pin the newest weight, or for 0 unpin it."""
        if nbytes and not self._is_pinned:
            padded = self._shard.pin()
            self._version += padded._version - self._shard_version  # noqa: SLF001
            _set_versions((self.weight,), (self._version,))
            self._is_pinned = True
        elif not nbytes and self._is_pinned:
            self._is_pinned = False
            now = self.weight._version  # noqa: SLF001
            is_dirty = now != self._version
            if is_dirty:
                torch.autograd.graph.increment_version(self._shard.padded)
            self._version, self._shard_version = now, self._shard.padded._version  # noqa: SLF001
            _set_versions((self.weight,), (now + _FREED,))
            # Last: after this another unit may have the memory.
            self._shard.unpin(dirty=is_dirty)


class InPlaceReduceScatter:
    """A reduce-scatter over one rank, for ``set_custom_reduce_scatter``: its result is its input.

    FSDP2 allocates input and output through it, one after the other, and copies one to the other;
    here both are the same tensor.
    """

    def __init__(self) -> None:
        """Begin without a buffer."""
        self._input: torch.Tensor | None = None

    def allocate(
        self, size: torch.Size, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for the input of a reduction, or for its output: the same."""
        buffer, self._input = self._input, None
        if buffer is not None and buffer.shape == size and buffer.dtype == dtype:
            return buffer
        self._input = torch.empty(size, dtype=dtype, device=device)
        return self._input

    def reset(self) -> None:
        """Forget a reduction that an exception ended: the next call is for an input."""
        self._input = None

    def __call__(self, *args: object, **kwargs: object) -> None:
        """Raise RuntimeError: FSDP2 does not call it over one rank."""
        del args, kwargs
        message = "A reduction over several ranks was requested of a reducer of one rank."
        raise RuntimeError(message)


@dataclass(frozen=True, eq=False, slots=True)
class AllGatherInput:
    """The source of one parameter's bytes for an all-gather."""

    storage: ShardStorage
    alias: UnshardedAlias | None = None
    """Set if the weight can be computed with in place, on one rank."""
    h2d_prefetcher: H2DPrefetcher | None = None
    """Set if the weight is copied to an accelerator ahead of its all-gather."""


class StowedParameter(OffloadedWeight):
    """A shard of a parameter that has shape, dtype and device, and no memory of its own."""

    source: AllGatherInput
    view_of: "tuple[StowedParameter, _View] | None"
    """What this is a view of, and which; None: the shard itself, or the padded shard."""

    @staticmethod
    def __new__(  # noqa: D102
        cls: type[Self], like: torch.Tensor, device: torch.device, source: AllGatherInput
    ) -> Self:
        tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, like.stride(), dtype=like.dtype, device=device
        )
        tensor.source, tensor.view_of = source, None
        return tensor

    def __repr__(self) -> str:  # type: ignore[override]
        """Return shape and dtype, not the elements."""
        return f"StowedParameter(shape={tuple(self.shape)}, dtype={self.dtype})"

    @property
    def local_shard(self) -> torch.Tensor:
        """This rank's elements in host memory, without padding."""
        return self.source.storage.local_shard

    @property
    def pager(self) -> PooledBuffer | None:
        """The disk-backed buffer that ``local_shard`` is in; None: it stays in host memory."""
        return self.source.storage.pager

    def fsdp_pre_all_gather(
        self,
        mesh: Any,  # noqa: ANN401  # torch's own signature, all five
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: Any,  # noqa: ANN401
    ) -> tuple[tuple[torch.Tensor, ...], UnshardedAlias | None]:
        """Return what this rank gives to the all-gather: its padded shard, cast to compute dtype.

        A single rank that computes with the shard in place returns no bytes, and its alias.
        """
        del mesh, outer_size, outer_stride, module
        dtype = mp_policy.param_dtype or self.dtype
        storage, alias = self.source.storage, self.source.alias
        if alias is not None and dtype == self.dtype:
            alias.pin()
            return (torch.empty(0, dtype=dtype, device=self.device),), alias
        if self.source.h2d_prefetcher is not None:
            return (self.source.h2d_prefetcher.all_gather_input(storage, dtype),), None
        gather_input = storage.pin_for_copy().to(self.device, dtype)
        storage.bytes_up += gather_input.nbytes
        return (gather_input,), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: UnshardedAlias | None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the unsharded parameter, and the tensors that are freed with it."""
        del param_dtype
        # From the second all-gather on FSDP2 passes ``out`` and takes no result.
        if metadata is not None:
            return None if out is not None else (metadata.weight, (metadata,))
        if self.source.h2d_prefetcher is not None:
            self.source.h2d_prefetcher.record_copied(self.source.storage)
        else:
            self.source.storage.unpin_after_copy()
        (unsharded,) = all_gather_outputs
        return None if out is not None else (unsharded, (unsharded,))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run ``func`` on the bytes; on shapes alone while FSDP2 shards or pads the parameter."""
        first = args[0] if isinstance(args[0], cls) else None
        if first is not None and func in ALIASES:
            same = cls(first, first.device, first.source)
            same.view_of = first.view_of
            return same
        if first is not None and not first.source.storage.is_sharded:
            return _run_on_shapes(first, func, args, kwargs or {})
        if first is not None and _is_padding_by_fsdp(first, func, args):
            return _run_on_shapes(first, func, args, kwargs or {})
        if first is not None and func.is_view:
            return _view(first, func, args[1:], kwargs or {})
        return _run_on_bytes(func, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:  # noqa: ANN401  # torch's own signature
        """Return a copy of the elements as an array."""
        return _plain_copy(self).numpy(force=force)

    def tolist(self) -> Any:  # noqa: ANN401  # torch's own signature
        """Return the elements as a list."""
        return _plain_copy(self).tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401  # torch's own signature
        """Pickle a copy of the elements, as a torch.Tensor."""
        reduce: Callable[[Any], Any] = _plain_copy(self).__reduce_ex__
        return reduce(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a copy of the elements, in memory of its own."""
        copy = memo[id(self)] = _plain_copy(self)
        return copy


def storage_of(parameter: torch.Tensor) -> ShardStorage | None:
    """Return the storage of a parameter or of its local shard; None: its bytes are its own."""
    local = to_local(parameter)
    return local.source.storage if isinstance(local, StowedParameter) else None


def _bytes_of(parameter: StowedParameter) -> torch.Tensor:
    """Return the elements in the storage, to be used while that is accessed."""
    if parameter.view_of is not None:
        parent, view = parameter.view_of
        return view(_bytes_of(parent))
    storage = parameter.source.storage
    whole = storage.padded if parameter.shape == storage.padded.shape else storage.local_shard
    return whole.view(parameter.shape)


def _view(parent: StowedParameter, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Return the view, or the several, that ``func`` takes of ``parent``."""
    # The meta device computes the shape: the bytes may not be in memory.
    like = torch.empty_strided(parent.shape, parent.stride(), dtype=parent.dtype, device="meta")
    # Some operations return several views: each view remembers its number.
    numbers = count()

    def wrap(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, torch.Tensor):
            return value
        number = next(numbers)

        def view(whole: torch.Tensor) -> torch.Tensor:
            views = func(whole, *args, **kwargs)
            part: torch.Tensor = views if isinstance(views, torch.Tensor) else views[number]
            return part

        wrapped = StowedParameter(value, parent.device, parent.source)
        wrapped.view_of = parent, view
        return wrapped

    return tree_map(wrap, func(like, *args, **kwargs))


def _is_padding_by_fsdp(parameter: StowedParameter, func: Any, args: Sequence[Any]) -> bool:  # noqa: ANN401
    """Return whether ``func`` is FSDP2's padding, which it repeats at the first forward."""
    if parameter.view_of is not None:
        return False
    storage = parameter.source.storage
    whole = {storage.padded.shape, storage.local_shard.shape}
    if func == torch.ops.aten.copy_.default:
        return isinstance(args[1], StowedParameter) and args[1].source.storage is storage
    if func not in _PADDING or parameter.shape not in whole:
        return False
    if func == _NEW_ZEROS and torch.Size(args[1]) == parameter.shape:
        return False  # zeros of its own shape are not FSDP2's padding: there is nothing to pad
    out = func(torch.empty(parameter.shape, device="meta"), *args[1:])
    return out.shape in whole or out.shape == (storage.padded.numel(),)


def _run_on_shapes(
    parameter: StowedParameter,
    func: Any,  # noqa: ANN401
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401
    """Return the result of ``func`` on the meta device."""

    def shape_of(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, StowedParameter):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    options = {**kwargs, "device": "meta"} if "device" in kwargs else kwargs
    out = func(*tree_map(shape_of, args), **options)
    # FSDP2 copies the shard into the padded shard, and the storage has both.
    if func == torch.ops.aten.copy_.default:
        return parameter

    def wrap(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, torch.Tensor):
            return value
        return StowedParameter(value, parameter.device, parameter.source)

    return tree_map(wrap, out)


@torch.no_grad()
def _plain_copy(parameter: StowedParameter) -> torch.Tensor:
    """Return a copy of the elements, a torch.Tensor."""
    return torch.clone(parameter)


def _run_on_bytes(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """Run ``func`` on host memory in place of stowed parameters.

    Those that ``func`` mutates are written back. Results have memory of their own.
    """
    mutated = {
        id(p.source.storage): p
        for p in written_arguments(func, args, kwargs)
        if isinstance(p, StowedParameter)
    }
    storages: dict[int, ShardStorage] = {}

    def bytes_of(value: Any) -> Any:  # noqa: ANN401
        if not isinstance(value, StowedParameter):
            return value
        storages[id(value.source.storage)] = value.source.storage
        return _bytes_of(value)

    # The arguments become views, whose bytes are in memory inside the block below.
    plain_args, plain_kwargs = tree_map(bytes_of, args), tree_map(bytes_of, kwargs)
    with ExitStack() as accessed:
        for key, storage in storages.items():
            accessed.enter_context(storage.access(write=key in mutated))
        out = func(*plain_args, **plain_kwargs)
        for parameter in mutated.values():  # what runs in here does not count as a version
            torch.autograd.graph.increment_version(parameter.local_shard)
        # The bytes may leave memory after the block, so results that share it are cloned.
        memory = {s.padded.untyped_storage().data_ptr() for s in storages.values()}

        def without_alias(value: Any) -> Any:  # noqa: ANN401
            if not isinstance(value, torch.Tensor):
                return value
            return value.clone() if value.untyped_storage().data_ptr() in memory else value

        target = kwargs.get("out", args[0] if args else None)
        is_mutated = isinstance(target, StowedParameter) and id(target.source.storage) in mutated
        return target if is_mutated and out is not None else tree_map(without_alias, out)
