"""The event log of all configurations in Chrome's trace format, which Perfetto reads too.

One process per configuration and one track per lane, the first step of each at time zero. Compute
spans are complete events; transfers overlap one another, so they are asynchronous ones. The memory
of the process is a counter. ``otherData`` holds the results without their spans.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from tensorstow.cli.demo.configurations import CONFIGURATIONS
from tensorstow.cli.demo.result import COMPUTE, RunResult, TimeSpan, by_key

LANES = (COMPUTE, "read", "update", "write", "wait")
_MICROSECONDS = 1e6


def trace(results: Sequence[RunResult]) -> dict[str, Any]:
    """Return the log as values for json.dump."""
    known = by_key(results)
    events = [
        e for pid, row in enumerate(CONFIGURATIONS) for e in _of_row(pid, row.name, known[row.key])
    ]
    summary = {
        result.key: {k: v for k, v in asdict(result).items() if k not in {"spans", "rss"}}
        for result in results
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary}


def _of_row(pid: int, name: str, result: RunResult) -> Iterator[dict[str, Any]]:
    yield _label(pid, 0, "process_name", {"name": name})
    yield _label(pid, 0, "process_sort_index", {"sort_index": pid})
    lanes = {span.lane for span in result.spans}
    for tid, lane in enumerate(LANES):
        if lane in lanes:
            yield _label(pid, tid, "thread_name", {"name": lane})
            yield _label(pid, tid, "thread_sort_index", {"sort_index": tid})
    for number, span in enumerate(result.spans):
        yield from _of_span(pid, number, span)
    for sample in result.rss:
        yield {
            "name": "RSS",
            "ph": "C",
            "pid": pid,
            "tid": 0,
            "ts": sample.time * _MICROSECONDS,
            "args": {"MiB": sample.nbytes / (1 << 20)},
        }


def _of_span(pid: int, number: int, span: TimeSpan) -> Iterator[dict[str, Any]]:
    facts = {"step": span.step, "chunk": span.chunk, "bytes": span.nbytes}
    event = {
        "name": span.name,
        "cat": span.lane,
        "pid": pid,
        "tid": LANES.index(span.lane),
        "ts": span.start * _MICROSECONDS,
        "args": {name: value for name, value in facts.items() if value > 0 or name != "bytes"},
    }
    if span.lane in {COMPUTE, "wait"}:
        yield {**event, "ph": "X", "dur": span.seconds * _MICROSECONDS}
        return
    identity = f"{pid}.{number}"
    yield {**event, "ph": "b", "id": identity}
    yield {**event, "ph": "e", "id": identity, "ts": span.stop * _MICROSECONDS, "args": {}}


def _label(pid: int, tid: int, kind: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": arguments}
