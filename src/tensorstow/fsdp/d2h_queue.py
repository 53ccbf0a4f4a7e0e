"""A queue of gradient copies from the device to host memory, beside the device's work.

[Note: Sums] The first micro-batch's gradient keeps its dtype; with the second the sum becomes fp32,
so that a bf16 sum does not lose what comes late. FSDP2 adds to ``.grad`` of a parameter's shard, so
what stands there is told of every micro-batch, and host memory has the sum. ``.grad`` says so: from
the second micro-batch on its dtype is fp32.

[Note: Pieces] The first gradient is copied as a whole, into memory of its own. What is added to it
is copied in pieces, through a few pinned buffers that all gradients of a model share. A piece is
added when its copy is complete: whenever a hook runs, and when somebody reads the sum. So backward
waits for no copy, pinned memory does not grow with the model, and of a large gradient one piece is
added while others are being copied. Copies complete in the order in which gradients were made, and
that is the order of each sum, whose bits depend on nothing else.

    first:  copied to its memory -> complete
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
from tensorstow.planner.bounds import MAX_IN_FLIGHT_BYTES

PIECE_BYTES = 4 << 20
BUFFERS = 8
"""How many pieces are copied at once."""


class HostAllocator(Protocol):
    """Where the first gradient of a step is copied to."""

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return host memory of the shape and dtype of ``like``."""


class HostSum:
    """One gradient's elements in host memory, some of which may still be copied or added."""

    def __init__(self, elements: torch.Tensor, queue: "D2HQueue | None" = None) -> None:
        """Take memory.

        Args:
            elements: The elements, or the memory that they will be copied to.
            queue: What copies gradients that are added; None: adding one waits for its copy.
        """
        self.elements = elements
        """The memory of ``landed``."""
        self.pending = 0
        """Gradients that are not added completely."""
        self._queue = queue
        self._copied: DeviceEvent | None = None

    @property
    def landed(self) -> torch.Tensor:
        """The elements, waited for."""
        self.synchronize()
        return self.elements

    def query(self) -> bool:
        """Return whether the elements are complete; adds what was copied meanwhile."""
        if self.pending and self._queue is not None:
            self._queue.poll()
        if self._copied is not None and self._copied.query():
            self._copied = None
        return self._copied is None and not self.pending

    def synchronize(self) -> None:
        """Return when the elements are complete."""
        if self.query():
            return
        if self.pending and self._queue is not None:
            self._queue.wait_for(self)
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None

    def fill(self, link: DeviceLink, source: torch.Tensor) -> DeviceEvent:
        """Begin copying a gradient here, behind what the caller's stream was given so far.

        Args:
            link: What copies.
            source: The gradient, contiguous; it must live until the event that is returned.
        """
        event = link.d2h([(self.elements.view(-1), source.view(-1))], [link.record_event()])
        self._copied = event
        return event

    def add(self, gradient: torch.Tensor, alpha: float = 1.0) -> None:
        """Add a later micro-batch's gradient, in fp32; with a queue, without waiting.

        Args:
            gradient: A gradient on the device, of the same shape.
            alpha: What it is multiplied by.
        """
        if self._queue is not None:
            self._queue.add(self, gradient, alpha)
        else:
            self.add_on_host(gradient.to(self.elements.device), alpha)

    def add_on_host(self, gradient: torch.Tensor, alpha: float = 1.0) -> None:
        """Add ``alpha`` times a gradient that is in host memory; waits for those before it."""
        landed = self.landed
        narrow = self.widen()
        if narrow is not None:
            self.elements.copy_(landed)
        self.elements.add_(gradient, alpha=alpha)

    def widen(self) -> torch.Tensor | None:
        """Make the memory fp32; return the narrower elements to copy into it, or None."""
        narrow = self.elements
        if narrow.dtype == torch.float32:
            return None
        self.elements = torch.empty(narrow.shape, dtype=torch.float32, device=narrow.device)
        return narrow


@dataclass(eq=False, slots=True)
class _QueuedGradient:
    """A gradient that is being copied, which the device keeps."""

    source: torch.Tensor
    """Its elements, 1-D."""
    left: int
    """How many elements are not copied and added."""
    total: HostSum
    made: DeviceEvent
    narrow: torch.Tensor | None = None
    """What the sum was, in its narrower dtype, where this gradient is the second of its step."""
    alpha: float = 1.0
    begun: int = 0
    """Of how many elements copies were begun."""


@dataclass(eq=False, slots=True)
class _Copy:
    """A piece of a gradient that is being copied."""

    gradient: _QueuedGradient
    start: int
    count: int
    complete: DeviceEvent
    buffer: torch.Tensor | None = None
    """What the piece passes through; None: it is a first gradient, copied to where it stays."""


class D2HQueue:
    """Copies gradients to host memory and sums them there, beside what the device computes next.

    Any thread: behind a backward that has raised, a hook may still come in the device's thread
    while the caller is in the next forward ([Note: Hooks] in step/calls.py).
    """

    def __init__(self, link: DeviceLink) -> None:
        """Copy over ``link``."""
        self._link = link
        self._lock = threading.RLock()
        self._in_flight: deque[_Copy] = deque()
        """In the order in which they complete: they are on one stream."""
        self._waiting: deque[_QueuedGradient] = deque()
        """Gradients that wait for a buffer, or for more of them."""
        self._block: PinnedBlock | None = None
        self._free: list[torch.Tensor] = []
        self._held = 0

    @property
    def pinned_bytes(self) -> int:
        """Return the pinned bytes of the buffers."""
        return 0 if self._block is None else self._block.pinned_bytes

    def copy(self, gradient: torch.Tensor, memory: HostAllocator) -> HostSum:
        """Begin copying the first gradient of a step.

        Waits only while copies are more than MAX_IN_FLIGHT_BYTES behind what the device computes.

        Args:
            gradient: The gradient; the device's memory is kept until it is copied.
            memory: Where it is copied to.

        Returns:
            Its elements, which are complete later.
        """
        self._wait_until_within_bound()
        gradient = gradient.contiguous()  # what is copied lives here until it is
        total = HostSum(memory.allocate(gradient), self)
        with SignalsDeferred(), self._lock:
            complete = total.fill(self._link, gradient)
            count = gradient.numel()
            sent = _QueuedGradient(gradient, count, total, complete)
            self._in_flight.append(_Copy(sent, 0, count, complete))
            self._held += gradient.nbytes
        return total

    def add(self, total: HostSum, gradient: torch.Tensor, alpha: float) -> None:
        """Begin copying a later micro-batch's gradient, to be added when it is there.

        Args:
            total: What ``copy`` returned for the first one.
            gradient: A gradient on the device, of the same shape.
            alpha: What it is multiplied by.
        """
        self._wait_until_within_bound()
        source = gradient.reshape(-1)
        made = self._link.record_event()
        with SignalsDeferred(), self._lock:
            narrow = total.widen()
            sent = _QueuedGradient(source, source.numel(), total, made, narrow, alpha)
            self._waiting.append(sent)
            self._held += source.nbytes
            total.pending += 1
        self.poll()

    def poll(self) -> None:
        """Add what was copied and begin further copies, without waiting."""
        with SignalsDeferred(), self._lock:
            while self._in_flight and self._in_flight[0].complete.query():
                self._complete_first()
            self._fill_buffers()

    def wait_for(self, total: HostSum) -> None:
        """Return when all that was given to ``add`` for ``total`` is added."""
        while total.pending:
            self._wait_for_first()

    def _wait_until_within_bound(self) -> None:
        self.poll()
        while self._held > MAX_IN_FLIGHT_BYTES:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        with self._lock:
            if self._in_flight:  # else another thread has taken the last of them meanwhile
                self._in_flight[0].complete.synchronize()
            self.poll()

    # --- inside, where no signal's handler comes ---

    def _complete_first(self) -> None:
        """Add what the first copy brought; the device's memory is freed with the last piece."""
        copy = self._in_flight[0]
        gradient = copy.gradient
        if copy.buffer is not None:
            _add(copy, copy.buffer)
            self._free.append(copy.buffer)
        self._in_flight.popleft()
        gradient.left -= copy.count
        if gradient.left == 0:
            self._held -= gradient.source.nbytes
            if copy.buffer is not None:
                gradient.total.pending -= 1

    def _fill_buffers(self) -> None:
        """Begin copying gradients that wait, while there are free buffers."""
        if self._waiting and self._block is None:
            self._block = block = PinnedBlock(
                BUFFERS * PIECE_BYTES, self._link.device, self._link.synchronize
            )
            starts = range(0, block.nbytes, PIECE_BYTES)
            self._free = [block.tensor(at, PIECE_BYTES, torch.uint8) for at in starts]
        while self._waiting and self._free:
            gradient = self._waiting[0]
            source = gradient.source[gradient.begun :][: PIECE_BYTES // gradient.source.itemsize]
            buffer = self._free[-1]
            complete = self._link.d2h([(_part(buffer, source), source)], [gradient.made])
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
    total = gradient.total.elements.view(-1)[part]
    if gradient.narrow is not None:
        total.copy_(gradient.narrow.view(-1)[part])
    total.add_(_part(buffer, gradient.source[part]), alpha=gradient.alpha)
