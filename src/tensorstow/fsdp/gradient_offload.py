"""How gradients leave the device once they are reduced: the hooks that take them down."""

import threading
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from tensorstow.fsdp.gradients import HostGradient
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.io.device_link import Link, Mark
from tensorstow.io.pinned import PinnedBlock

MOST_UNDER_WAY = 256 << 20
"""Bytes of gradients that the device holds for the link."""


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

    def __init__(self, link: Link) -> None:
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
            block = PinnedBlock(like.nbytes, self._link.device, self._link.settle)
            self._blocks.append(block)
            room = Room(block.tensor(0, like.nbytes, torch.uint8))
            rooms.append(room)
        return room.take(like)

    @property
    def nbytes(self) -> int:
        """Return the bytes that were in use at once, of each size of gradients."""
        return sum(block.nbytes for block in self._blocks)


class Falls:
    """Gradients on their way down, beside what the device computes next.

    One thread at a time: behind a backward that has raised, a hook may still come in the device's
    thread while the caller is in the next forward ([Note: Hooks] in step/calls.py).
    """

    def __init__(self, link: Link) -> None:
        """Let none be under way over ``link``."""
        self._link = link
        self._under_way: deque[tuple[Mark, torch.Tensor]] = deque()
        self._lock = threading.RLock()

    def begin(self, gradient: torch.Tensor, room: Room) -> HostGradient:
        """Return what ``gradient`` is to be in ``room``.

        The device has its memory back soon. Waits where the link is far behind what computes.
        """
        self.let_go()
        while sum(source.nbytes for _, source in self._under_way) > MOST_UNDER_WAY:
            self._under_way[0][0].synchronize()
            self._under_way.popleft()  # behind that: the device's memory lives until it is down
        gradient = gradient.contiguous()  # what is copied lives here until it is
        landed = HostGradient(gradient, room.take(gradient))
        self._under_way.append((landed.fall(self._link, gradient), gradient))
        return landed

    def let_go(self) -> None:
        """Free the device's memory of those that are down."""
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()


@torch.no_grad()
def take_down(
    parameter: torch.Tensor, *, falls: Falls | None = None, room: Room | None = None
) -> None:
    """Let the gradient of a sharded ``parameter`` leave the device: its hook, called by FSDP2.

    By ``falls`` into ``room`` beside what the device computes next; without them at once.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return
    local = gradient.to_local()
    _count(parameter, local, room)
    if not isinstance(local, HostGradient):
        if falls is None or room is None:
            gradient._local_tensor = HostGradient(local, local.cpu())  # noqa: SLF001
        else:
            gradient._local_tensor = falls.begin(local, room)  # noqa: SLF001
    elif local.landed.dtype != local.dtype:
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

    def __init__(self, parameter: torch.Tensor, falls: Falls, room: Room) -> None:
        """Watch ``parameter``, which is trained."""
        self._known = weakref.ref(parameter)
        self._falls, self._room = falls, room
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
            parameter.grad = self._falls.begin(gradient, self._room)
            return
        total.more(gradient)
        parameter.grad_dtype = None
        parameter.grad = HostGradient(gradient, total.landed, total.landed.dtype)


def _wide(gradient: DTensor, local: HostGradient) -> DTensor:
    """Return ``gradient`` in the dtype that its sum has by now."""
    summed = HostGradient(local, local.landed, local.landed.dtype)
    meta = TensorMeta(gradient.shape, gradient.stride(), summed.dtype)
    spec = replace(gradient._spec, tensor_meta=meta)  # noqa: SLF001
    wide: DTensor = DTensor(summed, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return wide
