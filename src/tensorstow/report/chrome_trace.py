"""Events in Chrome's trace format, which Perfetto reads too.

Spans of a lane that never overlap are complete events. Transfers overlap each other, so they are
asynchronous events. Bytes held are counters.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tensorstow.report.spans import Sample, TimeSpan

Event = dict[str, Any]
_MICROSECONDS = 1e6
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TracedProcess:
    """One process of a trace: a group of lanes in Perfetto."""

    pid: int
    name: str
    lanes: Sequence[str]
    """All possible lanes, in the order of display."""
    serial: frozenset[str]
    """Lanes whose spans never overlap."""


def events_of(
    process: TracedProcess, spans: Iterable[TimeSpan], held: Iterable[tuple[str, Iterable[Sample]]]
) -> Iterator[Event]:
    """Yield the events of one process: the activities of its lanes, and bytes held, by name."""
    spans = list(spans)
    pid = process.pid
    yield _label(pid, 0, "process_name", {"name": process.name})
    yield _label(pid, 0, "process_sort_index", {"sort_index": pid})
    used = {span.lane for span in spans}
    for tid, lane in enumerate(process.lanes):
        if lane in used:
            yield _label(pid, tid, "thread_name", {"name": lane})
            yield _label(pid, tid, "thread_sort_index", {"sort_index": tid})
    for number, span in enumerate(spans):
        yield from _of_span(process, number, span)
    for name, samples in held:
        for sample in samples:
            yield {
                "name": name,
                "ph": "C",
                "pid": pid,
                "tid": 0,
                "ts": sample.time * _MICROSECONDS,
                "args": {"MiB": sample.nbytes / _MIB},
            }


def _of_span(process: TracedProcess, number: int, span: TimeSpan) -> Iterator[Event]:
    facts = {"step": span.step, "chunk": span.chunk, "bytes": span.nbytes}
    event = {
        "name": span.name,
        "cat": span.lane,
        "pid": process.pid,
        "tid": process.lanes.index(span.lane),
        "ts": span.start * _MICROSECONDS,
        "args": {name: value for name, value in facts.items() if value > 0 or name != "bytes"},
    }
    if span.lane in process.serial:
        yield {**event, "ph": "X", "dur": span.seconds * _MICROSECONDS}
        return
    identity = f"{process.pid}.{number}"
    yield {**event, "ph": "b", "id": identity}
    yield {**event, "ph": "e", "id": identity, "ts": span.stop * _MICROSECONDS, "args": {}}


def _label(pid: int, tid: int, kind: str, arguments: dict[str, Any]) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
