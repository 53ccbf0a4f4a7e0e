"""Hooks that offload gradients: from the device to host memory, as soon as they are reduced.

Gradients of several micro-batches are summed in fp32: in host memory ([Note: Sums] in d2h_queue),
and by the hooks at the end of this file where they stay on the device.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from tensorstow.base.sizes import round_up
from tensorstow.fsdp.d2h_queue import D2HQueue, HostSum
from tensorstow.fsdp.host_gradient import HostGradient
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.fsdp.validation import validate_no_hooks
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.tensors.dtensor import shard_of

_ALIGN = 128
_OFFLOADS: "weakref.WeakKeyDictionary[torch.nn.Module, GradientOffload]" = (
    weakref.WeakKeyDictionary()
)


class PinnedBuffer:
    """Host memory for the gradients of one parameter, one after the other."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Take ``memory``: uint8, 1-D, as many bytes as a gradient has."""
        self._memory = memory.data  # buffers share a block: each counts its own versions
        self._last: weakref.ref[torch.Tensor] | None = None
        self.bytes_down = 0
        """Bytes that were copied of the gradients of a parameter on the device."""

    @property
    def is_free(self) -> bool:
        """Return whether nobody refers to what ``allocate`` returned last."""
        return self._last is None or self._last() is None

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory of the shape and dtype of ``like``, to be filled.

        It is other, pageable memory while somebody refers to what was returned last, or where the
        dtype is wider than the one that this memory is for.
        """
        if not self.is_free or like.nbytes > self._memory.nbytes:
            return torch.empty(like.shape, dtype=like.dtype, device=self._memory.device)
        gradient = self._memory[: like.nbytes].view(like.dtype).view(like.shape)
        self._last = weakref.ref(gradient)
        return gradient


class PinnedBufferPool(PinnedBuffer):
    """Pinned host memory for gradients of any parameter, as much as is in use at once.

    Whoever uses a gradient keeps the tensor that ``allocate`` returned.
    """

    def __init__(self, link: DeviceLink) -> None:
        """Hold no memory yet."""
        super().__init__(torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._link = link
        self._blocks: list[PinnedBlock] = []  # pinned as long as this lives
        self._buffers: dict[int, list[PinnedBuffer]] = {}
        """By their bytes."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return pinned memory of the shape and dtype of ``like`` that nobody refers to."""
        buffers = self._buffers.setdefault(like.nbytes, [])
        buffer = next((buffer for buffer in buffers if buffer.is_free), None)
        if buffer is None:
            block = PinnedBlock(like.nbytes, self._link.device, self._link.synchronize)
            self._blocks.append(block)
            buffer = PinnedBuffer(block.tensor(0, like.nbytes, torch.uint8))
            buffers.append(buffer)
        return buffer.allocate(like)

    @property
    def nbytes(self) -> int:
        """Return the bytes that were in use at once, of each size of gradients."""
        return sum(block.nbytes for block in self._blocks)


@torch.no_grad()
def offload_gradient(
    parameter: torch.Tensor, *, queue: D2HQueue | None = None, buffer: PinnedBuffer | None = None
) -> None:
    """Offload the gradient of a sharded parameter: its hook, called by FSDP2.

    Args:
        parameter: The parameter, with its reduced gradient.
        queue: What copies, beside what the device computes next; None: it is copied at once.
        buffer: What it is copied to.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    local = gradient.to_local()
    _count(parameter, local, buffer)
    if not isinstance(local, HostGradient):
        if queue is not None and buffer is not None:
            host = queue.copy(local, buffer)
        else:
            host = HostSum(local.cpu())
        gradient._local_tensor = HostGradient(local, host)  # noqa: SLF001
    elif local.host.elements.dtype != local.dtype:
        parameter.grad_dtype = None
        parameter.grad = _widened(gradient, local)


def _count(parameter: torch.Tensor, gradient: torch.Tensor, buffer: PinnedBuffer | None) -> None:
    """Count the bytes of a micro-batch's ``gradient`` that leave the device, or have left it."""
    counter = storage_of(parameter) or buffer
    if counter is None:
        return
    if isinstance(gradient, HostGradient):
        counter.bytes_down += gradient.uncounted
        gradient.uncounted = 0
    else:
        counter.bytes_down += gradient.nbytes


class UnshardedOffload:
    """Offloads the gradient of a parameter that is not sharded, by two hooks of autograd's.

    A later micro-batch's is added in host memory, in fp32.
    """

    def __init__(self, parameter: torch.Tensor, queue: D2HQueue, buffer: PinnedBuffer) -> None:
        """Watch ``parameter``, which is trained."""
        self._known = weakref.ref(parameter)
        self._queue, self._buffer = queue, buffer
        self._sum: HostGradient | None = None
        before: Any = parameter.register_hook
        before(self._set_aside)
        behind: Any = parameter.register_post_accumulate_grad_hook
        behind(self._take)

    def _set_aside(self, _: torch.Tensor) -> None:
        """Take what was offloaded out of ``.grad``: autograd would add to it on the device."""
        parameter = self._known()
        self._sum = None  # that of a backward which an exception ended
        if parameter is not None and isinstance(parameter.grad, HostGradient):
            self._sum, parameter.grad = parameter.grad, None

    @torch.no_grad()
    def _take(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        total, self._sum = self._sum, None
        if gradient is None or gradient.layout != torch.strided:  # the optimizer refuses it
            return
        self._buffer.bytes_down += gradient.nbytes
        if total is None:
            parameter.grad = HostGradient(gradient, self._queue.copy(gradient, self._buffer))
            return
        total.accumulate(gradient)
        parameter.grad_dtype = None
        parameter.grad = _summed(gradient, total.host)


def _widened(gradient: DTensor, local: HostGradient) -> DTensor:
    """Return ``gradient`` in the dtype that its sum has by now."""
    summed = _summed(local, local.host)
    meta = TensorMeta(gradient.shape, gradient.stride(), summed.dtype)
    spec = replace(gradient._spec, tensor_meta=meta)  # noqa: SLF001
    wide: DTensor = DTensor(summed, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return wide


def _summed(like: torch.Tensor, host: HostSum) -> HostGradient:
    """Return a gradient of the dtype that the sum has by now."""
    return HostGradient(like, host, host.elements.dtype)


class GradientOffload:
    """Offloads the gradients of parameters, also of those that are unfrozen later."""

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        link: DeviceLink | None = None,
        *,
        share_buffers: bool = False,
    ) -> None:
        """Register hooks on parameters that are trained now, before their optimizer's.

        Args:
            parameters: Whose gradients are offloaded.
            link: What copies them beside the device's work; None: each is copied at once.
            share_buffers: Whether a gradient is used as soon as it is copied (beside backward), so
                that pinned memory is only for those that are not used yet; False: each parameter
                has a pinned buffer of its own.
        """
        self._unhooked: list[Any] = list(parameters)
        self._sharded = [p for p in self._unhooked if isinstance(p, DTensor)]
        self._block: PinnedBlock | None = None  # pinned as long as this lives
        if link is not None and share_buffers:
            self._buffers: dict[int, PinnedBuffer] = dict.fromkeys(
                map(id, self._unhooked), PinnedBufferPool(link)
            )
        else:
            self._block, self._buffers = _allocate_buffers(self._unhooked, link)
        self._queue = None if link is None else D2HQueue(link)
        self.register_unfrozen()

    def register(self, model: torch.nn.Module) -> None:
        """Look before every forward of ``model`` for parameters that were unfrozen since."""
        model.register_forward_pre_hook(self.register_unfrozen, prepend=True)
        _OFFLOADS[model] = self

    @property
    def bytes_down(self) -> int:
        """Return the bytes copied of gradients of parameters on the device."""
        return sum(buffer.bytes_down for buffer in self._buffers.values())

    @property
    def pinned_bytes(self) -> int:
        """Return the bytes of pinned memory that gradients are copied to or pass through."""
        own = 0 if self._block is None else self._block.pinned_bytes
        return own + (0 if self._queue is None else self._queue.pinned_bytes)

    def register_unfrozen(self, *_: Any) -> None:  # noqa: ANN401  # also a forward pre-hook
        """Register hooks on parameters that are trained by now."""
        if self._queue is not None:
            self._queue.poll()
        for parameter in self._sharded:
            validate_no_hooks(parameter, "a parameter")
        still = []
        for parameter in self._unhooked:
            if parameter.requires_grad:
                self._register(parameter, self._buffers.get(id(parameter)))
            else:
                still.append(parameter)
        self._unhooked = still

    def _register(self, parameter: Any, buffer: PinnedBuffer | None) -> None:  # noqa: ANN401  # hooks
        if self._queue is not None and buffer is not None and not isinstance(parameter, DTensor):
            UnshardedOffload(parameter, self._queue, buffer)
        else:
            hook = partial(offload_gradient, queue=self._queue, buffer=buffer)
            parameter.register_post_accumulate_grad_hook(hook)


@torch.no_grad()
def _allocate_buffers(
    parameters: Sequence[torch.Tensor], link: DeviceLink | None
) -> tuple[PinnedBlock | None, dict[int, PinnedBuffer]]:
    """Return pinned memory for one gradient of each, and each parameter's part of it, by id."""
    if link is None:
        return None, {}
    sizes = [round_up(shard_of(p).nbytes, _ALIGN) for p in parameters]
    block = PinnedBlock(sum(sizes), link.device, link.synchronize)
    starts = accumulate(sizes, initial=0)
    buffers = {
        id(p): PinnedBuffer(block.tensor(at, shard_of(p).nbytes, torch.uint8))
        for p, at in zip(parameters, starts, strict=False)
    }
    return block, buffers


def offloaded_bytes(model: torch.nn.Module) -> int:
    """Return the bytes copied of gradients of parameters of ``model`` that are on the device."""
    offload = _OFFLOADS.get(model)
    return 0 if offload is None else offload.bytes_down


def offload_pinned_bytes(model: torch.nn.Module) -> int:
    """Return the bytes of pinned memory that gradients of ``model`` are copied to."""
    offload = _OFFLOADS.get(model)
    return 0 if offload is None else offload.pinned_bytes


# --- fp32 sums of gradients that stay on the device ---


def accumulate_in_fp32(parameters: Iterable[torch.Tensor]) -> None:
    """Let autograd sum the gradients of several backward passes in fp32.

    Within one backward they keep the gradient's dtype, as FSDP2's do.

    Args:
        parameters: Parameters that are not sharded; trained ones that are not fp32 get hooks.
    """
    for parameter in parameters:
        if parameter.dtype != torch.float32:
            sums: dict[str, torch.Tensor] = {}
            hook: Any = parameter.register_post_accumulate_grad_hook
            if parameter.requires_grad:
                before: Any = parameter.register_hook
                before(partial(_set_aside, weakref.ref(parameter), sums))
                hook(partial(_put_back, sums))


@torch.no_grad()
def _set_aside(
    known: "weakref.ref[torch.Tensor]", sums: dict[str, torch.Tensor], gradient: torch.Tensor
) -> None:
    parameter = known()
    if parameter is not None and parameter.grad is not None:
        sums["wide"] = parameter.grad.float().add_(gradient)
        parameter.grad = None


@torch.no_grad()
def _put_back(sums: dict[str, torch.Tensor], parameter: torch.Tensor) -> None:
    if "wide" in sums:
        parameter.grad_dtype = None
        parameter.grad = sums.pop("wide")


@torch.no_grad()
def widen_gradient(parameter: torch.Tensor) -> None:
    """Make the gradient of a sharded parameter fp32: its hook, called by FSDP2.

    FSDP2 adds the next micro-batch's to it.

    Args:
        parameter: A parameter whose gradient stays on the device.
    """
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        wide = parameter.grad.float()
        parameter.grad_dtype = None
        parameter.grad = wide
