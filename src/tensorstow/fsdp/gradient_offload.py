"""Copies gradients of stowed parameters to host memory once they are reduced; sums them there.

[Note: Sums] The first micro-batch's gradient keeps its dtype; with the second the sum becomes fp32,
so that a bf16 sum does not lose small late values. FSDP2 adds each micro-batch to ``.grad`` of a
parameter's shard, which is a ``HostGradient`` whose sum is in host memory. From the second
micro-batch on the dtype of ``.grad`` is fp32.

[Note: Pieces] The first gradient is copied as a whole, into memory of its own. What is added to it
is copied in pieces, through a few pinned buffers that all gradients of a model share. A piece is
added when its copy is complete: whenever a hook runs, and when the sum is read. So backward
waits for no copy, pinned memory does not grow with the model, and of a large gradient one piece is
added while others are being copied. Copies complete in the order in which gradients were made, and
that is the order of each sum, whose bits depend on nothing else.

    first:  copied to its memory -> complete
    later:  waits for a buffer -> a piece is copied to it -> added, and the buffer is free
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from tensorstow.base.signals import SignalsDeferred
from tensorstow.base.sizes import round_up
from tensorstow.fsdp.fp32_sums import SumAside
from tensorstow.fsdp.units import found_in
from tensorstow.fsdp.validation import validate_no_hooks
from tensorstow.io.device_link import DeviceEvent, DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.planner.bounds import MAX_IN_FLIGHT_BYTES, PIECE_BUFFERS, PIECE_BYTES
from tensorstow.tensors.dtensor import OffloadedGradient, set_gradient, shard_of, sharded_like
from tensorstow.tensors.placeholder import ALIASES, written_arguments

_ALIGN = 128
_OFFLOADS: "weakref.WeakKeyDictionary[torch.nn.Module, GradientOffload]" = (
    weakref.WeakKeyDictionary()
)
_ADD = torch.ops.aten.add_.Tensor


class HostSum:
    """One gradient's elements in host memory, some of which may still be copied or added."""

    def __init__(self, memory: torch.Tensor, queue: "D2HQueue | None" = None) -> None:
        """Take the elements, or memory that ``queue`` copies them to.

        Without a queue nothing is copied later: adding a gradient waits for its copy.
        """
        self.memory = memory
        """The memory of ``elements``."""
        self.pending = 0
        """The number of gradients that are not copied, or not added, completely."""
        self._queue = queue

    @property
    def elements(self) -> torch.Tensor:
        """The elements; waits until they are complete."""
        self.synchronize()
        return self.memory

    def query(self) -> bool:
        """Return whether the elements are complete; add pieces whose copies are complete."""
        if self.pending and self._queue is not None:
            self._queue.poll()
        return not self.pending

    def synchronize(self) -> None:
        """Wait until the elements are complete."""
        if self._queue is not None:
            self._queue.wait_for(self)

    def add(self, gradient: torch.Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times a gradient on the device, in fp32; with a queue, without waiting."""
        if self._queue is not None:
            self._queue.add(self, gradient, alpha)
        else:
            self.add_on_host(gradient.to(self.memory.device), alpha)

    def add_on_host(self, gradient: torch.Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times a gradient that is in host memory; waits for earlier gradients."""
        elements = self.elements
        narrow = self.widen()
        if narrow is not None:
            self.memory.copy_(elements)
        self.memory.add_(gradient, alpha=alpha)

    def widen(self) -> torch.Tensor | None:
        """Make the memory fp32; return the narrower elements to copy into it, or None."""
        narrow = self.memory
        if narrow.dtype == torch.float32:
            return None
        self.memory = torch.empty(narrow.shape, dtype=torch.float32, device=narrow.device)
        return narrow


@dataclass(eq=False, slots=True)
class _QueuedGradient:
    """A gradient that is being copied, whose memory on the device is kept."""

    source: torch.Tensor
    """Its elements, 1-D."""
    total: HostSum
    ready: DeviceEvent
    narrow: torch.Tensor | None = None
    """The sum in its narrower dtype, if this gradient is the second of its step."""
    alpha: float = 1.0
    begun: int = 0
    """The number of elements whose copies have begun."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A piece of a gradient that is being copied."""

    gradient: _QueuedGradient
    start: int
    count: int
    complete: DeviceEvent
    buffer: torch.Tensor | None = None
    """The buffer for the piece; None: a first gradient is copied to the memory of its sum."""


class D2HQueue:
    """Copies gradients to host memory and sums them there while the device computes.

    Any thread may call: after a backward that has raised, a hook may still run in the device's
    thread while the caller is in the next forward ([Note: Hooks] in step/call_lock.py).
    """

    def __init__(self, link: DeviceLink) -> None:
        """Copy over ``link``."""
        self._link = link
        self._lock = threading.RLock()
        self._in_flight: deque[_Copy] = deque()
        """Copies in the order in which they complete: they are on one stream."""
        self._waiting: deque[_QueuedGradient] = deque()
        """Gradients that wait for a buffer for their next piece."""
        self._block: PinnedBlock | None = None
        self._free: list[torch.Tensor] = []
        self._held = 0

    @property
    def pinned_bytes(self) -> int:
        """Return the pinned bytes of the buffers."""
        return 0 if self._block is None else self._block.pinned_bytes

    def copy(self, gradient: torch.Tensor, memory: "GradientMemory") -> HostSum:
        """Begin copying the first gradient of a step; return its sum, which is complete later.

        Waits only while gradients of more than MAX_IN_FLIGHT_BYTES are being copied.
        """
        self._wait_until_within_bound()
        source = gradient.contiguous().view(-1)  # lives until it is copied
        total = HostSum(memory.allocate(gradient), self)
        # After contiguous(), which may copy in the caller's stream.
        ready = self._link.record_event()
        with SignalsDeferred(), self._lock:
            # Signals are deferred: a copy without a record would lose the memory that it uses.
            complete = self._link.d2h([(total.memory.view(-1), source)], [ready])
            sent = self._hold(_QueuedGradient(source, total, ready))
            self._in_flight.append(_Copy(sent, 0, source.numel(), complete))
        return total

    def add(self, total: HostSum, gradient: torch.Tensor, alpha: float) -> None:
        """Begin copying a later micro-batch's gradient, to be added when the copy is complete."""
        self._wait_until_within_bound()
        source, ready = gradient.reshape(-1), self._link.record_event()
        with SignalsDeferred(), self._lock:
            sent = _QueuedGradient(source, total, ready, total.widen(), alpha)
            self._waiting.append(self._hold(sent))
        self.poll()

    def poll(self) -> None:
        """Add pieces whose copies are complete and begin further copies, without waiting."""
        with SignalsDeferred(), self._lock:
            while self._in_flight and self._in_flight[0].complete.query():
                self._complete_first()
            self._fill_buffers()

    def wait_for(self, total: HostSum) -> None:
        """Wait until all gradients of ``total`` are copied and added."""
        while total.pending:
            self._wait_for_first()

    def _wait_until_within_bound(self) -> None:
        self.poll()
        while self._held > MAX_IN_FLIGHT_BYTES:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        # The lock is held for this look alone, not during the wait: other threads go on.
        with self._lock:
            first = self._in_flight[0] if self._in_flight else None
        if first is not None:  # else another thread has completed the last of them meanwhile
            first.complete.synchronize()
        self.poll()

    # --- called with signals deferred ---

    def _hold(self, gradient: _QueuedGradient) -> _QueuedGradient:
        """Keep a gradient's memory on the device until its last piece is copied."""
        self._held += gradient.source.nbytes
        gradient.total.pending += 1
        return gradient

    def _complete_first(self) -> None:
        """Add the piece of the oldest copy; the device's memory is freed with the last piece."""
        copy = self._in_flight[0]
        gradient = copy.gradient
        if copy.buffer is not None:
            _add(copy, copy.buffer)
            self._free.append(copy.buffer)
        self._in_flight.popleft()
        if copy.start + copy.count == gradient.source.numel():
            self._held -= gradient.source.nbytes
            gradient.total.pending -= 1

    def _fill_buffers(self) -> None:
        """Begin copying the waiting gradients, while buffers are free."""
        # Only a second micro-batch needs the buffers, so they are pinned at their first use.
        if self._waiting and self._block is None:
            self._block = block = PinnedBlock(
                PIECE_BUFFERS * PIECE_BYTES, self._link.device, self._link.synchronize
            )
            starts = range(0, block.nbytes, PIECE_BYTES)
            self._free = [block.tensor(at, PIECE_BYTES, torch.uint8) for at in starts]
        while self._waiting and self._free:
            gradient = self._waiting[0]
            source = gradient.source[gradient.begun :][: PIECE_BYTES // gradient.source.itemsize]
            # If the copy cannot begin, the buffer stays free and the gradient stays first.
            buffer = self._free[-1]
            complete = self._link.d2h([(_part(buffer, source), source)], [gradient.ready])
            self._free.pop()
            count = source.numel()
            self._in_flight.append(_Copy(gradient, gradient.begun, count, complete, buffer))
            gradient.begun += count
            if gradient.begun == gradient.source.numel():
                self._waiting.popleft()


def _part(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.nbytes].view(like.dtype)


def _add(copy: _Copy, buffer: torch.Tensor) -> None:
    """Add the elements in ``buffer`` to their sum."""
    gradient = copy.gradient
    part = slice(copy.start, copy.start + copy.count)
    total = gradient.total.memory.view(-1)[part]
    if gradient.narrow is not None:
        # widen() has made new memory, and the first gradient's elements come to it here.
        total.copy_(gradient.narrow.view(-1)[part])
    total.add_(_part(buffer, gradient.source[part]), alpha=gradient.alpha)


# --- the tensor in .grad ---


class HostGradient(OffloadedGradient):
    """A gradient of the device's shape, dtype and device, with its elements in host memory.

    Operations run in host memory, so that norms, clipping and unscaling change the elements
    that the update uses.
    """

    host: HostSum
    """Its elements; aliases of this tensor share them."""

    @staticmethod
    def __new__(
        cls: type[Self], like: torch.Tensor, host: HostSum, dtype: torch.dtype | None = None
    ) -> Self:
        """Create a gradient like ``like``, with ``dtype`` if set and the elements of ``host``."""
        tensor = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001
            cls, like.shape, dtype=dtype or like.dtype, device=like.device
        )
        tensor.host = host
        return tensor

    @property
    def elements(self) -> torch.Tensor:
        """The elements in host memory; waits until they are copied."""
        return self.host.elements

    def __repr__(self) -> str:  # type: ignore[override]
        """Return the elements as text."""
        return f"HostGradient({self.elements!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed as an instance's
        cls,
        func: Any,  # noqa: ANN401  # torch's own signature
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run ``func`` on the elements in host memory; results are on the gradient's device."""
        named = kwargs or {}
        first = args[0]
        if isinstance(first, cls) and (func in ALIASES or _is_whole_view(func, args)):
            return cls(first, first.host)
        if isinstance(first, cls) and func == _ADD and _is_micro_batch(first, args[1]):
            first.accumulate(args[1], **named)
            return first
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def on_host(value: Any) -> Any:  # noqa: ANN401
            if isinstance(value, cls):
                return value.elements
            if not isinstance(value, torch.Tensor) or value.is_cpu:
                return value
            copies.append((value, value.cpu()))
            return copies[-1][1]

        out = func(*tree_map(on_host, args), **tree_map(on_host, named))
        if func._schema.is_mutable:  # noqa: SLF001
            for original, copy in copies:  # found_inf, which GradScaler passes
                original.copy_(copy)
            for written in written_arguments(func, args, named):
                if isinstance(written, cls):  # what runs in here does not count as a version
                    torch.autograd.graph.increment_version(written.elements)
            return _mutated_result(func, args, named)
        leaves = tree_leaves((args, named))
        device = next(leaf.device for leaf in leaves if isinstance(leaf, cls))
        return tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, out)

    def accumulate(self, other: torch.Tensor, alpha: float = 1.0) -> None:
        """Add a later micro-batch's gradient, times ``alpha``, in fp32."""
        if isinstance(other, HostGradient):
            self.host.add_on_host(other.elements, alpha)
        else:
            self.host.add(other, alpha)
        torch.autograd.graph.increment_version(self.host.memory)


def _is_micro_batch(total: HostGradient, other: object) -> bool:
    """Return whether FSDP2 adds a micro-batch's gradient; users may add other tensors."""
    return (
        isinstance(other, torch.Tensor)
        and other.shape == total.shape
        and torch._C._current_graph_task_id() != -1  # noqa: SLF001  # as FSDP2 asks
    )


def _is_whole_view(func: Any, args: Sequence[Any]) -> bool:  # noqa: ANN401
    """Return whether ``func`` passes a tensor on, as ``DTensor.to_local`` does."""
    if func == torch.ops.aten.view_as.default:
        return bool(args[0].shape == args[1].shape)
    return bool(func == torch.ops.aten.view.default and [*args[1]] == [*args[0].shape])


def _mutated_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """Return the result of an in-place ``func``: the argument that it wrote to."""
    if not func._schema.returns:  # noqa: SLF001  # an operation on lists
        return None
    return kwargs.get("out", args[0])


# --- hooks ---


class PinnedBuffer:
    """Host memory for the gradients of one parameter, one after the other."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Take ``memory``: uint8, 1-D, as many bytes as a gradient has."""
        self._memory = memory.data  # buffers share a block: each counts its own versions
        self._last: weakref.ref[torch.Tensor] | None = None

    @property
    def is_free(self) -> bool:
        """Whether the last tensor that ``allocate`` returned is no longer referenced."""
        return self._last is None or self._last() is None

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialized memory of the shape and dtype of ``like``.

        It is new, pageable memory while the last result is still referenced, or if the dtype is
        wider than that of the buffer.
        """
        if not self.is_free or like.nbytes > self._memory.nbytes:
            return torch.empty(like.shape, dtype=like.dtype, device=self._memory.device)
        gradient = self._memory[: like.nbytes].view(like.dtype).view(like.shape)
        self._last = weakref.ref(gradient)
        return gradient


class PinnedBufferPool:
    """Pinned host memory for gradients of any parameter, as much as is in use at once.

    Memory is in use while the tensor that ``allocate`` returned is referenced.
    """

    def __init__(self, link: DeviceLink) -> None:
        """Begin without memory."""
        self._link = link
        self._blocks: list[PinnedBlock] = []  # pinned as long as this lives
        self._buffers: dict[int, list[PinnedBuffer]] = {}
        """Buffers by their size in bytes."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return unused pinned memory of the shape and dtype of ``like``: old, if any is free."""
        buffers = self._buffers.setdefault(like.nbytes, [])
        buffer = next((buffer for buffer in buffers if buffer.is_free), None)
        if buffer is None:
            block = PinnedBlock(like.nbytes, self._link.device, self._link.synchronize)
            self._blocks.append(block)
            buffer = PinnedBuffer(block.tensor(0, like.nbytes, torch.uint8))
            buffers.append(buffer)
        return buffer.allocate(like)


GradientMemory = PinnedBuffer | PinnedBufferPool
"""Allocates the memory that a gradient is copied to."""


@torch.no_grad()
def _offload_sharded(
    queue: D2HQueue | None, memory: GradientMemory | None, parameter: torch.Tensor
) -> None:
    """Offload the reduced gradient of a parameter, which FSDP2 calls this hook with.

    Without a queue it is copied synchronously.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    local = gradient.to_local()
    if not isinstance(local, HostGradient):
        if queue is not None and memory is not None:
            host = queue.copy(local, memory)
        else:
            host = HostSum(local.cpu())
        gradient._local_tensor = HostGradient(local, host)  # noqa: SLF001
    elif local.host.memory.dtype != local.dtype:
        # This micro-batch has made the sum fp32, and ``.grad`` is to show that.
        set_gradient(parameter, sharded_like(gradient, _summed(local, local.host)))


def _offload_whole(
    queue: D2HQueue, memory: GradientMemory, gradient: torch.Tensor, total: torch.Tensor | None
) -> torch.Tensor:
    """Return the offloaded gradient of a parameter that is not sharded, added to the earlier one.

    A later micro-batch's gradient is added in host memory, in fp32.
    """
    if gradient.layout != torch.strided:  # the optimizer raises the error
        return gradient
    if not isinstance(total, HostGradient):
        return HostGradient(gradient, queue.copy(gradient, memory))
    total.accumulate(gradient)
    return _summed(gradient, total.host)


def _summed(like: torch.Tensor, host: HostSum) -> HostGradient:
    """Return a gradient in the present dtype of the sum."""
    return HostGradient(like, host, host.memory.dtype)


class GradientOffload:
    """Offloads gradients of parameters, including those that are unfrozen later."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        link: DeviceLink | None = None,
        *,
        share_buffers: bool = False,
        are_wide: bool = False,
    ) -> None:
        """Register hooks on the trained parameters, before those of their optimizer.

        Args:
            parameters: The parameters whose gradients are offloaded.
            link: Copies them while the device computes; None: copies are synchronous.
            share_buffers: Whether a gradient is used as soon as it is copied (during backward), so
                that pinned memory is only for those that are not used yet; False: each parameter
                has a pinned buffer of its own.
            are_wide: Whether gradients of 16-bit parameters are fp32.
        """
        self._unhooked: list[Any] = list(parameters)
        self._sharded = [p for p in self._unhooked if isinstance(p, DTensor)]
        self._block: PinnedBlock | None = None  # pinned as long as this lives
        if link is not None and share_buffers:
            self._buffers: Mapping[int, GradientMemory] = dict.fromkeys(
                map(id, self._unhooked), PinnedBufferPool(link)
            )
        else:
            self._block, self._buffers = _allocate_buffers(self._unhooked, link, are_wide=are_wide)
        self._link = link
        self._queue = None if link is None else D2HQueue(link)
        self.register_unfrozen()

    def register(self, model: torch.nn.Module) -> None:
        """Register hooks on parameters that were unfrozen, before every forward of ``model``."""
        model.register_forward_pre_hook(self.register_unfrozen, prepend=True)
        _OFFLOADS[model] = self

    @property
    def bytes_down(self) -> int:
        """Return the bytes of gradients that were copied from the device."""
        return 0 if self._link is None else self._link.bytes_down

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of pinned memory that gradients are copied to or pass through."""
        block_bytes = 0 if self._block is None else self._block.pinned_bytes
        return block_bytes + (0 if self._queue is None else self._queue.pinned_bytes)

    def register_unfrozen(self, *_: Any) -> None:  # noqa: ANN401  # also a forward pre-hook
        """Register hooks on parameters that are trained now."""
        if self._queue is not None:
            self._queue.poll()
        for parameter in self._sharded:
            # Users may have registered hooks since stow(), and FSDP2 would never call them.
            validate_no_hooks(parameter, "a parameter")
        frozen = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                self._register(parameter, self._buffers.get(id(parameter)))
            else:
                frozen.append(parameter)
        self._unhooked = frozen

    def _register(self, parameter: Any, memory: GradientMemory | None) -> None:  # noqa: ANN401  # hooks
        if self._queue is not None and memory is not None and not isinstance(parameter, DTensor):
            add = partial(_offload_whole, self._queue, memory)
            SumAside(parameter, add, is_aside=lambda earlier: isinstance(earlier, HostGradient))
        else:
            hook = partial(_offload_sharded, self._queue, memory)
            parameter.register_post_accumulate_grad_hook(hook)


@torch.no_grad()
def _allocate_buffers(
    parameters: Sequence[torch.Tensor], link: DeviceLink | None, *, are_wide: bool
) -> tuple[PinnedBlock | None, dict[int, PinnedBuffer]]:
    """Return pinned memory for a gradient of each parameter, and the parts of it by id."""
    if link is None:
        return None, {}
    least = torch.float32.itemsize if are_wide else 1
    nbytes = [shard_of(p).numel() * max(p.itemsize, least) for p in parameters]
    sizes = [round_up(count, _ALIGN) for count in nbytes]
    block = PinnedBlock(sum(sizes), link.device, link.synchronize)
    # The last of these is the end of the block, hence strict=False.
    starts = accumulate(sizes, initial=0)
    buffers = {
        id(p): PinnedBuffer(block.tensor(at, count, torch.uint8))
        for p, at, count in zip(parameters, starts, nbytes, strict=False)
    }
    return block, buffers


def gradient_offload_of(model: torch.nn.Module) -> GradientOffload | None:
    """Return the offload of a model's gradients; None if there is none."""
    return found_in(_OFFLOADS, model)
