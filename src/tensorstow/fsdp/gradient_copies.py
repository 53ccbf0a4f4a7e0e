"""Gradients that come down beside backward: the first of a step, and those that are added to it.

[Note: Sums] The first micro-batch's gradient keeps its dtype; with the second the sum becomes fp32,
so that a bf16 sum does not lose what comes late. FSDP2 adds to ``.grad`` of a parameter's shard, so
what stands there is told of every micro-batch, and host memory has the sum. ``.grad`` says so: from
the second micro-batch on its dtype is fp32.

[Note: Pieces] The first gradient comes down as a whole, into memory of its own. What is added to it
comes in pieces, through a few pinned buffers that all gradients of a model share. A piece is added
when it is there: as hooks come, and when somebody reads the sum. So backward waits for no copy,
pinned memory does not grow with the model, and of a large gradient one piece is added while others
are on their way. Copies are made in the order in which gradients came, so that is the order of each
sum, whose bits depend on nothing else.

    first:  copied to its memory -> there
    later:  waits for a buffer -> a piece is copied to it -> added, and the buffer is free
"""

import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import torch

from tensorstow.base.signals import SignalsDeferred
from tensorstow.io.device_link import DeviceEvent, DeviceLink
from tensorstow.io.pinned import PinnedBlock

MOST_UNDER_WAY = 256 << 20
"""Bytes of gradients that the device holds for the link."""
PIECE_BYTES = 4 << 20
PIECES = 8
"""That have a buffer at once."""


class Memory(Protocol):
    """Where the first gradient of a step goes."""

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory for a gradient like ``like``."""


class HostSum:
    """The elements of one gradient in host memory, some of which may be on their way."""

    def __init__(self, elements: torch.Tensor, copies: "GradientCopies | None" = None) -> None:
        """Take ``elements``; ``copies`` brings what is added to them. None: that waits."""
        self.elements = elements
        """What ``landed`` is or will be."""
        self.awaited = 0
        """Gradients of which something is still to be added."""
        self._copies = copies
        self._fallen: DeviceEvent | None = None

    @property
    def landed(self) -> torch.Tensor:
        """The elements when they are there."""
        self.synchronize()
        return self.elements

    def query(self) -> bool:
        """Return whether they are; adds what has come down."""
        if self.awaited and self._copies is not None:
            self._copies.move_on()
        if self._fallen is not None and self._fallen.query():
            self._fallen = None
        return self._fallen is None and not self.awaited

    def synchronize(self) -> None:
        """Return when they are."""
        if self.query():
            return
        if self.awaited and self._copies is not None:
            self._copies.finish(self)
        if self._fallen is not None:
            self._fallen.synchronize()
            self._fallen = None

    def fill(self, link: DeviceLink, source: torch.Tensor) -> DeviceEvent:
        """Begin copying a gradient here, behind what the caller's stream was given so far.

        It must live until the mark that is returned is over.
        """
        mark = link.d2h([(self.elements.view(-1), source.view(-1))], [link.record_event()])
        self._fallen = mark
        return mark

    def add(self, gradient: torch.Tensor, alpha: float = 1.0) -> None:
        """Add a micro-batch's gradient from the device, times ``alpha``, in fp32.

        Returns at once where there is a link, and the elements are there later.
        """
        if self._copies is not None:
            self._copies.add(self, gradient, alpha)
        else:
            self.add_here(gradient.to(self.elements.device), alpha)

    def add_here(self, gradient: torch.Tensor, alpha: float = 1.0) -> None:
        """Add a gradient that is in host memory."""
        landed = self.landed
        narrow = self.widen()
        if narrow is not None:
            self.elements.copy_(landed)
        self.elements.add_(gradient, alpha=alpha)

    def widen(self) -> torch.Tensor | None:
        """Let the elements be fp32; return those that are to be copied to them, or None."""
        narrow = self.elements
        if narrow.dtype == torch.float32:
            return None
        self.elements = torch.empty(narrow.shape, dtype=torch.float32, device=narrow.device)
        return narrow


@dataclass(eq=False, slots=True)
class _Gradient:
    """A gradient on its way, which the device holds."""

    source: torch.Tensor
    """Its elements, 1-D."""
    left: int
    """How many of them are not where they belong."""
    total: HostSum
    made: DeviceEvent
    narrow: torch.Tensor | None = None
    """What the sum was, in another dtype, where this is the second of its step."""
    alpha: float = 1.0
    begun: int = 0
    """Of how many copies have begun."""


@dataclass(eq=False, slots=True)
class _Copy:
    """Elements of a gradient that come down."""

    gradient: _Gradient
    start: int
    count: int
    over: DeviceEvent
    buffer: torch.Tensor | None = None
    """Which they pass through; None: they are the first, and stay where they come down."""


class GradientCopies:
    """Gradients on their way down, beside what the device computes next.

    Any thread: behind a backward that has raised, a hook may still come in the device's thread
    while the caller is in the next forward ([Note: Hooks] in step/calls.py).
    """

    def __init__(self, link: DeviceLink) -> None:
        """Let none be under way over ``link``."""
        self._link = link
        self._lock = threading.RLock()
        self._under_way: deque[_Copy] = deque()
        """In the order in which they end: they are on one stream."""
        self._waiting: deque[_Gradient] = deque()
        """For a buffer, or for more of them."""
        self._block: PinnedBlock | None = None
        self._free: list[torch.Tensor] = []
        self._held = 0

    @property
    def pinned_bytes(self) -> int:
        """Return the pinned bytes of the buffers."""
        return 0 if self._block is None else self._block.pinned_bytes

    def begin(self, gradient: torch.Tensor, memory: Memory) -> HostSum:
        """Return what ``gradient``, the first of its step, is to be in ``memory``.

        The device has its own back soon. Waits where the link is far behind what computes.
        """
        self._make_way()
        gradient = gradient.contiguous()  # what is copied lives here until it is
        total = HostSum(memory.take(gradient), self)
        with SignalsDeferred(), self._lock:
            over = total.fill(self._link, gradient)
            count = gradient.numel()
            leaving = _Gradient(gradient, count, total, over)
            self._under_way.append(_Copy(leaving, 0, count, over))
            self._held += gradient.nbytes
        return total

    def add(self, total: HostSum, gradient: torch.Tensor, alpha: float) -> None:
        """Let a later micro-batch's ``gradient`` be added to ``total``, as ``begin`` does."""
        self._make_way()
        source = gradient.reshape(-1)
        made = self._link.record_event()
        with SignalsDeferred(), self._lock:
            narrow = total.widen()
            leaving = _Gradient(source, source.numel(), total, made, narrow, alpha)
            self._waiting.append(leaving)
            self._held += source.nbytes
            total.awaited += 1
        self.move_on()

    def move_on(self) -> None:
        """Add what has come down, let more come, and wait for nothing."""
        with SignalsDeferred(), self._lock:
            while self._under_way and self._under_way[0].over.query():
                self._take_first()
            self._fill_buffers()

    def finish(self, total: HostSum) -> None:
        """Return when nothing is to be added to ``total`` any more."""
        while total.awaited:
            self._wait_for_one()

    def _make_way(self) -> None:
        self.move_on()
        while self._held > MOST_UNDER_WAY:
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        with self._lock:
            if self._under_way:  # else another thread has taken the last of them meanwhile
                self._under_way[0].over.synchronize()
            self.move_on()

    # --- inside, where no signal's handler comes ---

    def _take_first(self) -> None:
        """Add what the first copy has brought; the device's memory goes with its last piece."""
        copy = self._under_way[0]
        gradient = copy.gradient
        if copy.buffer is not None:
            _add(copy, copy.buffer)
            self._free.append(copy.buffer)
        self._under_way.popleft()
        gradient.left -= copy.count
        if gradient.left == 0:
            self._held -= gradient.source.nbytes
            if copy.buffer is not None:
                gradient.total.awaited -= 1

    def _fill_buffers(self) -> None:
        """Begin copying what waits, as far as there are buffers."""
        if self._waiting and self._block is None:
            self._block = block = PinnedBlock(
                PIECES * PIECE_BYTES, self._link.device, self._link.synchronize
            )
            starts = range(0, block.nbytes, PIECE_BYTES)
            self._free = [block.tensor(at, PIECE_BYTES, torch.uint8) for at in starts]
        while self._waiting and self._free:
            gradient = self._waiting[0]
            source = gradient.source[gradient.begun :][: PIECE_BYTES // gradient.source.itemsize]
            buffer = self._free[-1]
            over = self._link.d2h([(_part(buffer, source), source)], [gradient.made])
            self._free.pop()
            count = source.numel()
            self._under_way.append(_Copy(gradient, gradient.begun, count, over, buffer))
            gradient.begun += count
            if gradient.begun == gradient.source.numel():
                self._waiting.popleft()


def _part(buffer: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return buffer[: like.nbytes].view(like.dtype)


def _add(copy: _Copy, buffer: torch.Tensor) -> None:
    """Add the elements in ``buffer`` to their sum."""
    gradient = copy.gradient
    part = slice(copy.start, copy.start + copy.count)
    sum_ = gradient.total.elements.view(-1)[part]
    if gradient.narrow is not None:
        sum_.copy_(gradient.narrow.view(-1)[part])
    sum_.add_(_part(buffer, gradient.source[part]), alpha=gradient.alpha)
