"""The event log of all configurations: one process each, its first step at time zero.

``otherData`` holds the results without their spans.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from demo.configurations import CONFIGURATIONS
from demo.result import RunResult, by_key
from tensorstow.report.chrome_trace import TracedProcess, events_of
from tensorstow.report.spans import COMPUTE

LANES = (COMPUTE, "read", "update", "write", "wait")
_SERIAL = frozenset({COMPUTE, "wait"})


def trace(results: Sequence[RunResult]) -> dict[str, Any]:
    """Return the log as values for json.dump."""
    runs = by_key(results)
    events = [
        event
        for pid, row in enumerate(CONFIGURATIONS)
        for event in events_of(
            TracedProcess(pid, row.name, LANES, _SERIAL),
            runs[row.key].spans,
            [("RSS", runs[row.key].rss)],
        )
    ]
    summary = {
        result.key: {k: v for k, v in asdict(result).items() if k not in {"spans", "rss"}}
        for result in results
    }
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": summary}
