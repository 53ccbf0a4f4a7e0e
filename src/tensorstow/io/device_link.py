"""The link between host memory and an accelerator, through ``torch.accelerator`` alone.

[Note: Side streams] Gradients are copied to the host on one stream of our own and weights to the
device on another, so that both directions run at once and next to the caller's stream. Updates on
the device use a third one, so that the caller's stream does not wait for states. These states are
copied by streams of a second link (``second_link``): a copy to the host that waits for its update
must not delay gradients that are ready. Nothing synchronizes the whole device: streams wait for
events of other streams, and the host waits for the event of one copy.

On the CPU there are no streams: a copy is complete when it returns, and so is every event. Callers
see no difference, so machines without an accelerator test the same code.
"""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Generic, Protocol, TypeVar

import torch

from tensorstow.io.transfer_log import CopyTimes, LoggedTransfer, TransferLog

Waiting = TypeVar("Waiting")
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(to, from): 1-D, of one length and dtype."""
DOWN, UP = "link down", "link up"
"""The lanes of a log of copies: from the device, and to it."""


class DeviceEvent(Protocol):
    """A point in the work of a stream; ``torch.Event`` is one."""

    def query(self) -> bool:
        """Return whether all work before it is over."""

    def synchronize(self) -> None:
        """Return when it is."""


class StreamLink:
    """Copies between host memory and one accelerator, with the events that order them."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self.device = device
        self._bytes_down = 0
        self._bytes_up = 0
        self._second_links: list[StreamLink] = []
        self._d2h_stream = torch.Stream(device=device)
        self._h2d_stream = torch.Stream(device=device)
        self._update_stream = torch.Stream(device=device)
        self._log: tuple[CopyTimes, TransferLog] | None = None

    @property
    def bytes_down(self) -> int:
        """Return the bytes copied from device to host, including links from ``second_link``."""
        return self._bytes_down + sum(link.bytes_down for link in self._second_links)

    @property
    def bytes_up(self) -> int:
        """Return the bytes copied from host to device, including links from ``second_link``."""
        return self._bytes_up + sum(link.bytes_up for link in self._second_links)

    def record_event(self) -> DeviceEvent:
        """Record an event in the caller's stream, after all its work so far."""
        return torch.accelerator.current_stream(self.device).record_event()

    def d2h(self, pairs: Pairs, after: Iterable[DeviceEvent]) -> DeviceEvent:
        """Start a copy from device to host after the events ``after``; return its event.

        The sources must live until that event is over.
        """
        for event in after:
            self._d2h_stream.wait_event(_torch_event(event))
        self._bytes_down += self._copy(DOWN, pairs, self._d2h_stream)
        return self._d2h_stream.record_event()

    def h2d(self, pairs: Pairs, after: Iterable[DeviceEvent] = ()) -> DeviceEvent:
        """Start a copy from host to device after the events ``after``; return its event.

        The sources must not change until that event is over.
        """
        for event in after:
            self._h2d_stream.wait_event(_torch_event(event))
        self._bytes_up += self._copy(UP, pairs, self._h2d_stream)
        for to, _ in pairs:
            # Its memory must not be anybody else's before the copy is over.
            to.record_stream(self._h2d_stream)
        return self._h2d_stream.record_event()

    def join(self, event: DeviceEvent) -> None:
        """Make the caller's stream wait for ``event``."""
        torch.accelerator.current_stream(self.device).wait_event(_torch_event(event))

    def update_stream(self) -> AbstractContextManager[object]:
        """Make a stream of the link the current stream inside the block, for updates."""
        return self._update_stream

    def second_link(self) -> "StreamLink":
        """Return a link with streams of its own, whose work and bytes count as this one's too."""
        link = StreamLink(self.device)
        if self._log is not None:
            link.start_log(self._log[1])
        self._second_links.append(link)
        return link

    def synchronize(self) -> None:
        """Return when no copy and no update is under way, of its second links too."""
        for link in self._second_links:
            link.synchronize()
        self._update_stream.synchronize()
        self._d2h_stream.synchronize()
        self._h2d_stream.synchronize()

    def start_log(self, log: TransferLog) -> None:
        """Log copies to ``log`` from now on, timed by the device."""
        self._log = (CopyTimes(self.device), log)
        for link in self._second_links:
            link.start_log(log)

    def end_log(self) -> None:
        """Log the rest, and stop logging."""
        logged, self._log = self._log, None
        if logged is not None:
            times, log = logged
            times.into(log)
        for link in self._second_links:
            link.end_log()

    def _copy(self, lane: str, pairs: Pairs, stream: torch.Stream) -> int:
        """Enqueue the copies in ``stream``, timed if there is a log; return their bytes."""
        if self._log is None:
            return _copy(pairs, stream)
        times = self._log[0]
        begun = times.begin(stream)
        nbytes = _copy(pairs, stream)
        times.end(lane, nbytes, begun, stream)
        return nbytes


def _torch_event(event: DeviceEvent) -> torch.Event:
    if not isinstance(event, torch.Event):
        message = f"An event of another link was given: {event!r}."
        raise TypeError(message)
    return event


def _copy(pairs: Pairs, stream: torch.Stream) -> int:
    """Enqueue the copies in ``stream``; return their bytes."""
    with stream:
        for to, source in pairs:
            to.copy_(source, non_blocking=True)  # returns at once if the host's side is pinned
    return sum(to.nbytes for to, _ in pairs)


class PlainLink:
    """A link to a device that is the CPU itself."""

    def __init__(self) -> None:
        """Begin with counters at zero."""
        self.device = torch.device("cpu")
        self.bytes_down = 0
        self.bytes_up = 0
        self._log: TransferLog | None = None

    def record_event(self) -> DeviceEvent:
        """Return an event that is over."""
        return COMPLETE

    def d2h(self, pairs: Pairs, after: Iterable[DeviceEvent]) -> DeviceEvent:
        """Copy; return an event that is over."""
        del after
        self.bytes_down += self._copy(DOWN, pairs)
        return COMPLETE

    def h2d(self, pairs: Pairs, after: Iterable[DeviceEvent] = ()) -> DeviceEvent:
        """Copy; return an event that is over."""
        del after
        self.bytes_up += self._copy(UP, pairs)
        return COMPLETE

    def join(self, event: DeviceEvent) -> None:
        """Return: it is over."""

    def update_stream(self) -> AbstractContextManager[object]:
        """Return a context that changes nothing: there are no streams."""
        return nullcontext()

    def second_link(self) -> "PlainLink":
        """Return this link: copies on the CPU do not wait for each other."""
        return self

    def synchronize(self) -> None:
        """Return: nothing is ever under way."""

    def start_log(self, log: TransferLog) -> None:
        """Log copies to ``log`` from now on."""
        self._log = log

    def end_log(self) -> None:
        """Log no more."""
        self._log = None

    def _copy(self, lane: str, pairs: Pairs) -> int:
        start = time.monotonic()
        for to, source in pairs:
            to.copy_(source)
        nbytes = sum(to.nbytes for to, _ in pairs)
        if self._log is not None:
            self._log.add(LoggedTransfer(lane, lane, start, time.monotonic(), nbytes))
        return nbytes


DeviceLink = StreamLink | PlainLink
"""A link to a device, which may be the CPU itself."""


class DeviceMemory:
    """Bytes of a device's memory that are filled by copies, one after the other."""

    def __init__(self, nbytes: int, link: DeviceLink) -> None:
        """Allocate them."""
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=link.device)
        # Kernels of the caller that used this memory before may not be over.
        self.last_use: DeviceEvent = link.record_event()
        """The next copy to it waits for this."""

    def tensor(self, offset: int, count: int, dtype: torch.dtype, /) -> torch.Tensor:
        """Return a 1-D view of ``count`` elements from byte ``offset``."""
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype)


class _Complete:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


COMPLETE: DeviceEvent = _Complete()
"""The event of what is over."""


class CopyQueue(Generic[Waiting]):
    """Copies under way in the order in which they end, each with what waits for it."""

    def __init__(self) -> None:
        """Begin with none."""
        self._copies: deque[tuple[Waiting, DeviceEvent]] = deque()

    def __len__(self) -> int:
        """Return the number of copies that were not taken out."""
        return len(self._copies)

    @property
    def oldest(self) -> DeviceEvent | None:
        """Return the event of the oldest copy; None: the queue is empty."""
        return self._copies[0][1] if self._copies else None

    def add(self, waiting: Waiting, copied: DeviceEvent) -> None:
        """Add a copy, complete after ``copied``, that ``waiting`` waits for."""
        self._copies.append((waiting, copied))

    def pop(self) -> Waiting:
        """Wait for the oldest copy, and return what waits for it."""
        waiting, copied = self._copies.popleft()
        copied.synchronize()
        return waiting

    def pop_complete(self) -> Iterator[Waiting]:
        """Return what waits for the oldest copies, as long as these are complete."""
        while self._copies and self._copies[0][1].query():
            yield self._copies.popleft()[0]

    def clear(self) -> None:
        """Drop all copies."""
        self._copies.clear()


def is_remote(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in an accelerator's memory."""
    return not tensor.is_cpu and tensor.device.type == _accelerator()


def is_away(device: torch.device) -> bool:
    """Return whether ``device`` has memory of its own."""
    return device.type != "cpu"


def open_link(device: torch.device) -> DeviceLink:
    """Return a new link to ``device``."""
    return PlainLink() if device.type == "cpu" else StreamLink(device)


@lru_cache(maxsize=1)
def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type
