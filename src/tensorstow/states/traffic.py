"""Counters of bytes and chunks that moved, and a log of events."""

from dataclasses import dataclass

from tensorstow.states.layout import RingPlan
from tensorstow.states.native_handle import NativeHandle

_LONGEST_TRACE = 1 << 18  # events: a log that nobody ends must not fill memory


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One entry of the event log; times are of ``time.monotonic()``."""

    lane: str
    """read, update, write, or wait: the caller was blocked."""
    start: float
    stop: float
    chunk: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes and chunks moved since the optimizer was created."""

    bytes_read: int
    bytes_written: int
    chunks_updated: int
    ring_high_water_bytes: int
    wait_seconds: float
    """Time that the caller was blocked."""
    bytes_spared: int = 0
    """Bytes that were not read, because a buffer still held them."""
    bytes_down: int = 0
    """Bytes from an accelerator: gradients, and weights that the user wrote; or states."""
    bytes_up: int = 0
    """Bytes to an accelerator: new weights; or states that it updates."""
    device_share: float = 0.0
    """Share of the states that the next step updates on the accelerator (``update_on``)."""


class TrafficCounters:
    """The counters of one pipeline, which outlive it."""

    def __init__(self, handle: NativeHandle) -> None:
        """Use the pipeline of ``handle``."""
        self._handle = handle
        self.ring: RingPlan | None = None
        """The slots of the ring; None: no ring exists yet."""
        self.update_lane = "update"
        """The lane of updates, with the number of their threads."""
        self._is_tracing = False
        self._last_traffic = Traffic(0, 0, 0, 0, 0.0)
        self._last_trace: list[TraceEvent] = []

    def begin(self) -> None:
        """Continue the log in a new pipeline."""
        if self._is_tracing and self._handle.native is not None:
            self._handle.native.start_trace(_LONGEST_TRACE)

    def end(self) -> None:
        """Keep the counters of a pipeline that is about to be closed."""
        self._last_traffic, self._last_trace = self.traffic(), self.trace()

    def traffic(self) -> Traffic:
        """Return the bytes moved so far."""
        if self._handle.native is None or self.ring is None:
            return self._last_traffic
        now = self._handle.native.counters()
        return Traffic(
            bytes_read=int(now["bytes_read"]),
            bytes_written=int(now["bytes_written"]),
            bytes_spared=int(now["bytes_spared"]),
            chunks_updated=int(now["chunks_updated"]),
            ring_high_water_bytes=int(now["slots_high_water"]) * self.ring.slot_bytes
            + int(now["small_high_water"]) * self.ring.small_bytes,
            wait_seconds=now["wait_seconds"],
        )

    def start_trace(self) -> None:
        """Begin an event log (bounded: the first 262,144 events are kept)."""
        self._is_tracing = True
        self._last_trace = []
        if self._handle.native is not None:
            self._handle.native.start_trace(_LONGEST_TRACE)

    def end_trace(self) -> None:
        """Stop logging events; those logged can still be read."""
        # Before the flag is dropped: without it `trace` returns the last log.
        self._last_trace = self.trace()
        self._is_tracing = False
        if self._handle.native is not None:
            self._handle.native.start_trace(0)

    def lane_of(self, event: TraceEvent) -> str:
        """Return the lane of an event: for transfers with the directory, else with the threads."""
        native = self._handle.native
        if event.lane in {"read", "write"} and native is not None:
            path = self._handle.path_of(native.place(event.chunk)[0])
            return f"{event.lane} ({path.parent})"
        return self.update_lane if event.lane == "update" else event.lane

    def trace(self) -> list[TraceEvent]:
        """Return the event log so far; empty if no log was begun."""
        if self._handle.native is None or not self._is_tracing:
            return self._last_trace
        return [TraceEvent(*event) for event in self._handle.native.trace()]
