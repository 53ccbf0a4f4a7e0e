"""The link between host memory and an accelerator, through ``torch.accelerator`` alone.

[Note: Side streams] Gradients go down on one stream of our own and weights up on another, so that
both directions of the link run at once and beside whatever the caller's stream computes. Nobody
waits for the whole device: streams wait for marks (events) of other streams, and the host waits
for the mark behind one copy.

On the CPU there are no streams. A copy is over when it returns and so is every mark; whoever drives
a link cannot tell, which is how machines without an accelerator test what drives it.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

import torch

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(to, from): 1-D, of one length and dtype."""


class Mark(Protocol):
    """A point in the work of a stream; ``torch.Event`` is one."""

    def query(self) -> bool:
        """Return whether all work before it is over."""

    def synchronize(self) -> None:
        """Return when it is."""


class Link(Protocol):
    """Copies between host memory and one device, and what they wait for."""

    device: torch.device
    bytes_down: int
    bytes_up: int

    def mark(self) -> Mark:
        """Return a mark behind everything that the caller's stream was given so far."""

    def down(self, pairs: Pairs, after: Iterable[Mark]) -> Mark:
        """Copy device to host when ``after`` is over; return a mark behind it, at once.

        The sources must live until that mark is over.
        """

    def up(self, pairs: Pairs, after: Iterable[Mark] = ()) -> Mark:
        """Copy host to device when ``after`` is over; return a mark behind it, at once.

        The sources must not change until that mark is over.
        """

    def join(self, mark: Mark) -> None:
        """Let what the caller's stream is given from now on wait for ``mark``."""

    def settle(self) -> None:
        """Return when no copy is under way."""


class StreamLink:
    """A link to an accelerator."""

    def __init__(self, device: torch.device) -> None:
        """Make the streams."""
        self.device = device
        self.bytes_down = 0
        self.bytes_up = 0
        self._down = torch.Stream(device=device)
        self._up = torch.Stream(device=device)

    def mark(self) -> Mark:
        """Return a mark behind everything that the caller's stream was given so far."""
        return torch.accelerator.current_stream(self.device).record_event()

    def down(self, pairs: Pairs, after: Iterable[Mark]) -> Mark:
        """Copy device to host when ``after`` is over; return a mark behind it, at once."""
        for mark in after:
            self._down.wait_event(_event_of(mark))
        self.bytes_down += _copy(pairs, self._down)
        return self._down.record_event()

    def up(self, pairs: Pairs, after: Iterable[Mark] = ()) -> Mark:
        """Copy host to device when ``after`` is over; return a mark behind it, at once."""
        for mark in after:
            self._up.wait_event(_event_of(mark))
        self.bytes_up += _copy(pairs, self._up)
        for to, _ in pairs:
            # Its memory must not be anybody else's before the copy is over.
            to.record_stream(self._up)
        return self._up.record_event()

    def join(self, mark: Mark) -> None:
        """Let what the caller's stream is given from now on wait for ``mark``."""
        torch.accelerator.current_stream(self.device).wait_event(_event_of(mark))

    def settle(self) -> None:
        """Return when no copy is under way."""
        self._down.synchronize()
        self._up.synchronize()


def _event_of(mark: Mark) -> torch.Event:
    if not isinstance(mark, torch.Event):
        message = f"A mark of another link was given: {mark!r}."
        raise TypeError(message)
    return mark


def _copy(pairs: Pairs, stream: torch.Stream) -> int:
    """Give the copies to ``stream``; return their bytes."""
    with stream:
        for to, source in pairs:
            to.copy_(source, non_blocking=True)
    return sum(to.nbytes for to, _ in pairs)


class PlainLink:
    """A link to a device that is the CPU itself."""

    def __init__(self) -> None:
        """Have moved nothing yet."""
        self.device = torch.device("cpu")
        self.bytes_down = 0
        self.bytes_up = 0

    def mark(self) -> Mark:
        """Return a mark that is over."""
        return _OVER

    def down(self, pairs: Pairs, after: Iterable[Mark]) -> Mark:
        """Copy; return a mark that is over."""
        del after
        self.bytes_down += _copy_now(pairs)
        return _OVER

    def up(self, pairs: Pairs, after: Iterable[Mark] = ()) -> Mark:
        """Copy; return a mark that is over."""
        del after
        self.bytes_up += _copy_now(pairs)
        return _OVER

    def join(self, mark: Mark) -> None:
        """Return: it is over."""

    def settle(self) -> None:
        """Return: nothing is ever under way."""


def _copy_now(pairs: Pairs) -> int:
    for to, source in pairs:
        to.copy_(source)
    return sum(to.nbytes for to, _ in pairs)


class _Over:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


_OVER = _Over()


def is_remote(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is in an accelerator's memory."""
    return not tensor.is_cpu and tensor.device.type == _accelerator()


def is_away(device: torch.device) -> bool:
    """Return whether what computes on ``device`` has memory of its own."""
    return device.type != "cpu"


def open_link(device: torch.device) -> Link:
    """Return a new link to ``device``."""
    return PlainLink() if device.type == "cpu" else StreamLink(device)


@lru_cache(maxsize=1)
def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator()
    return None if device is None else device.type
