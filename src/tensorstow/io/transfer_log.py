"""Logs of transfers and of waits for them, kept during a recording."""

import time
from dataclasses import dataclass

import torch

_MOST = 1 << 17


@dataclass(frozen=True, slots=True)
class LoggedTransfer:
    """One transfer or wait of a lane; times are of ``time.monotonic()``."""

    lane: str
    name: str
    start: float
    stop: float
    nbytes: int = 0


class TransferLog:
    """A bounded log: the first 131,072 entries are kept, and the rest is counted."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.transfers: list[LoggedTransfer] = []
        self.dropped = 0

    def add(self, transfer: LoggedTransfer) -> None:
        """Keep an entry if the log is not full."""
        if len(self.transfers) < _MOST:
            self.transfers.append(transfer)
        else:
            self.dropped += 1


class CopyTimes:
    """When copies over a link to an accelerator began and ended there, by its own events."""

    def __init__(self, device: torch.device) -> None:
        """Wait for the work of the current stream, and relate the device's time to the host's."""
        self._device = device
        self._copies: list[tuple[str, int, torch.Event, torch.Event]] = []
        self._dropped = 0
        self._zero = self._event()
        self._zero.record(torch.accelerator.current_stream(device))
        self._zero.synchronize()
        self._zero_time = time.monotonic()

    def begin(self, stream: torch.Stream) -> torch.Event:
        """Return an event before a copy that ``stream`` is given next."""
        event = self._event()
        event.record(stream)
        return event

    def end(self, lane: str, nbytes: int, begun: torch.Event, stream: torch.Stream) -> None:
        """Keep a copy, whose event ``begin`` returned."""
        if len(self._copies) >= _MOST:
            self._dropped += 1
            return
        event = self._event()
        event.record(stream)
        self._copies.append((lane, nbytes, begun, event))

    def into(self, log: TransferLog) -> None:
        """Wait for the copies that were kept, and put them into ``log``."""
        for lane, nbytes, begun, ended in self._copies:
            ended.synchronize()
            start, stop = (
                self._zero_time + self._zero.elapsed_time(event) / 1e3 for event in (begun, ended)
            )
            log.add(LoggedTransfer(lane, lane, start, stop, nbytes))
        log.dropped += self._dropped
        self._copies, self._dropped = [], 0

    def _event(self) -> torch.Event:
        return torch.Event(self._device, enable_timing=True)
