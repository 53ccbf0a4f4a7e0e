"""How gradients leave the device once they are reduced: the hooks that take them down."""

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from tensorstow.fsdp.gradient_copies import GradientCopies, HostSum
from tensorstow.fsdp.gradients import HostGradient
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.io.device_link import DeviceLink
from tensorstow.io.pinned import PinnedBlock


class Room:
    """Host memory that the gradients of one parameter fall into, one after the other."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Take ``memory``: bytes, 1-D, as many as a gradient has."""
        self._memory = memory
        self._last: weakref.ref[torch.Tensor] | None = None
        self.bytes_down = 0
        """Of the gradients of a parameter on the device."""

    @property
    def is_free(self) -> bool:
        """Return whether nobody has what ``take`` returned last."""
        return self._last is None or self._last() is None

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a gradient like ``like``.

        Other memory while somebody has the last one still, or where its dtype is a wider one.
        """
        if not self.is_free or like.nbytes > self._memory.nbytes:
            return torch.empty(like.shape, dtype=like.dtype, device=self._memory.device)
        landed = self._memory[: like.nbytes].view(like.dtype).view(like.shape)
        self._last = weakref.ref(landed)
        return landed


class Passage(Room):
    """Host memory that gradients of any parameter pass through.

    As much as is in use at once: whoever uses a gradient keeps the tensor that ``take`` returned.
    """

    def __init__(self, link: DeviceLink) -> None:
        """Hold no memory yet."""
        super().__init__(torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._link = link
        self._blocks: list[PinnedBlock] = []  # pinned as long as this lives
        self._rooms: dict[int, list[Room]] = {}
        """By their bytes."""

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a gradient like ``like``, pinned, that nobody uses."""
        rooms = self._rooms.setdefault(like.nbytes, [])
        room = next((room for room in rooms if room.is_free), None)
        if room is None:
            block = PinnedBlock(like.nbytes, self._link.device, self._link.synchronize)
            self._blocks.append(block)
            room = Room(block.tensor(0, like.nbytes, torch.uint8))
            rooms.append(room)
        return room.take(like)

    @property
    def nbytes(self) -> int:
        """Return the bytes that were in use at once, of each size of gradients."""
        return sum(block.nbytes for block in self._blocks)


@torch.no_grad()
def take_down(
    parameter: torch.Tensor, *, copies: GradientCopies | None = None, room: Room | None = None
) -> None:
    """Let the gradient of a sharded ``parameter`` leave the device: its hook, called by FSDP2.

    By ``copies`` into ``room`` beside what the device computes next; without them at once.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    local = gradient.to_local()
    _count(parameter, local, room)
    if not isinstance(local, HostGradient):
        if copies is not None and room is not None:
            host = copies.begin(local, room)
        else:
            host = HostSum(local.cpu())
        gradient._local_tensor = HostGradient(local, host)  # noqa: SLF001
    elif local.host.elements.dtype != local.dtype:
        parameter.grad_dtype = None
        parameter.grad = _wide(gradient, local)


def _count(parameter: torch.Tensor, gradient: torch.Tensor, room: Room | None) -> None:
    """Count the bytes of a micro-batch's ``gradient`` that leave the device, or have left it."""
    counter = storage_of(parameter) or room
    if counter is None:
        return
    if isinstance(gradient, HostGradient):
        counter.bytes_down += gradient.uncounted
        gradient.uncounted = 0
    else:
        counter.bytes_down += gradient.nbytes


class WholeTaker:
    """Lets the gradient of a parameter that is not sharded leave the device, by its hooks.

    A later micro-batch's is added in host memory, in fp32.
    """

    def __init__(self, parameter: torch.Tensor, copies: GradientCopies, room: Room) -> None:
        """Watch ``parameter``, which is trained."""
        self._known = weakref.ref(parameter)
        self._copies, self._room = copies, room
        self._sum: HostGradient | None = None
        before: Any = parameter.register_hook
        before(self._set_aside)
        behind: Any = parameter.register_post_accumulate_grad_hook
        behind(self._take)

    def _set_aside(self, _: torch.Tensor) -> None:
        """Keep what has come down: autograd is to add nothing to it on the device."""
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
        self._room.bytes_down += gradient.nbytes
        if total is None:
            parameter.grad = HostGradient(gradient, self._copies.begin(gradient, self._room))
            return
        total.more(gradient)
        parameter.grad_dtype = None
        parameter.grad = _summed(gradient, total.host)


def _wide(gradient: DTensor, local: HostGradient) -> DTensor:
    """Return ``gradient`` in the dtype that its sum has by now."""
    summed = _summed(local, local.host)
    meta = TensorMeta(gradient.shape, gradient.stride(), summed.dtype)
    spec = replace(gradient._spec, tensor_meta=meta)  # noqa: SLF001
    wide: DTensor = DTensor(summed, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return wide


def _summed(like: torch.Tensor, host: HostSum) -> HostGradient:
    """Return a gradient of the dtype that the sum has by now."""
    return HostGradient(like, host, host.elements.dtype)
