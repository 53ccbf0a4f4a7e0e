"""The report of a run as files: a page, a trace for Perfetto, and the figures as JSON."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from tensorstow.base.directories import make_folder
from tensorstow.base.new_file import new_stream
from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.report.chrome_trace import TracedProcess, events_of
from tensorstow.report.page import LOG_VIEW, LogRow, document, faint, log_of, table
from tensorstow.report.run_record import (
    STEP,
    WAIT,
    RunRecord,
    lane_figures,
    median_step,
    stalls,
    step_parts,
)
from tensorstow.report.spans import COMPUTE, Sample

_DAY = 86_400
_TERABYTE = 10**12
_NAMES = {
    "process": ("HOST", "memory of the process, Python and torch included"),
    "device": ("DEVICE", "memory that torch has allocated on the accelerator"),
    "buffer pool": ("HOST", "of that, weights that are read from disk"),
    "states": ("HOST", "of that, optimizer states and the buffers that they pass through"),
    "disk": ("DISK", "files of states and weights"),
}


def write_report(record: RunRecord, directory: Path) -> dict[str, Path]:
    """Write the report of a run to a folder; return the paths of its files by kind.

    Raises:
        DirectoryError: The files cannot be written.
    """
    files = {
        "page": (directory / "report.html", page_of(record)),
        "trace": (directory / "trace.json", _json(trace_of(record))),
        "figures": (directory / "report.json", _json(figures_of(record), indent=2)),
    }
    make_folder(directory)
    for path, text in files.values():
        with new_stream(path) as stream:
            stream.write(text.encode())
    return {name: path for name, (path, _) in files.items()}


def trace_of(record: RunRecord) -> dict[str, Any]:
    """Return the event log in Chrome's trace format, a lane per disk, link and worker."""
    serial = frozenset({COMPUTE, WAIT})
    process = TracedProcess(0, record.title, record.lanes(), serial)
    events = list(events_of(process, record.spans, record.held.items()))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": figures_of(record)}


def figures_of(record: RunRecord) -> dict[str, Any]:
    """Return every figure of the page as plain values; times in seconds."""
    return {
        "title": record.title,
        "seconds": record.seconds,
        "steps": record.steps,
        "median_step_seconds": median_step(record),
        "parts": [asdict(part) for part in step_parts(record)],
        "stalls": dict(stalls(record)),
        "lanes": [{**asdict(lane), "rate": lane.rate} for lane in lane_figures(record)],
        "moved": dict(record.moved),
        "written": record.written,
        "peak_bytes": {name: _peak(samples) for name, samples in record.held.items()},
        "disk_bytes": record.disk_bytes,
        "memory": asdict(record.memory),
        "traffic": asdict(record.traffic),
        "plan": [
            {
                "tier": item.tier,
                "what": item.purpose,
                "predicted": item.predicted,
                "measured": item.measured,
            }
            for item in record.compared
        ],
        "predicted_step": None if record.predicted is None else asdict(record.predicted),
        "dropped": record.dropped,
    }


def page_of(record: RunRecord) -> str:
    """Return the page: figures, memory over time, parts of a step, bytes, and the event log."""
    parts = [f"<h1>{escape(record.title)}</h1>", *_summary(record)]
    log = None
    if record.seconds:
        parts += ["<h2>Memory</h2>", *_memory(record)]
        parts += ["<h2>Where the time of a step goes</h2>", *_parts(record)]
        parts += ["<h2>Transfers and updates</h2>", *_lanes(record)]
    parts += ["<h2>Bytes moved, and wear</h2>", *_bytes(record)]
    if record.compared:
        parts += ["<h2>The plan: predicted and measured</h2>", *_plan(record)]
    if record.spans:
        parts += ["<h2>The event log</h2>", LOG_VIEW, faint(_LOG_HELP)]
        if record.dropped:
            parts.append(faint(f"The log was full: {record.dropped:,} later entries are missing."))
        log = _log(record)
    return document(record.title, "\n".join(parts), log)


_LOG_HELP = (
    "Drag to move; + and \N{MINUS SIGN} or Ctrl + wheel to zoom. trace.json next to this page has"
    " the same for ui.perfetto.dev and chrome://tracing. Backward is the time from the end of a"
    " forward to the optimizer's step or the next forward."
)


def _summary(record: RunRecord) -> Iterable[str]:
    if not record.seconds:
        yield faint(
            "Nothing was recorded: figures are totals since the optimizer was created. Run a few"
            " steps inside `with optimizer.recording():` for times, memory and the event log."
        )
        return
    blocked = sum(seconds for _, seconds in stalls(record))
    step = median_step(record)
    facts = [f"{format_count(record.steps, 'step')} in {_seconds(record.seconds)}"]
    if step is not None:
        facts.append(f"{_seconds(step)} per step (median)")
    if record.steps:
        facts.append(
            f"{_seconds(blocked / record.steps)} of a step waiting"
            f" ({blocked / record.seconds:.0%} of the time)"
        )
    yield f'<p class="cost">{escape("; ".join(facts))}.</p>'


def _memory(record: RunRecord) -> Iterable[str]:
    end = record.seconds
    for name, samples in record.held.items():
        tier, about = _NAMES.get(name, ("HOST", name))
        if any(sample.nbytes for sample in samples):
            yield _curve(f"{tier}: {about}", samples, end)


def _curve(title: str, samples: Sequence[Sample], end: float) -> str:
    """Return one curve over time; the scale begins at zero."""
    peak = _peak(samples)
    if all(sample.nbytes == peak for sample in samples):
        held = f"{format_bytes(peak)} throughout"
        return _captioned(title, held, "")
    first, last = samples[0].nbytes, samples[-1].nbytes
    points = [(1000 * s.time / end, 100 - 100 * s.nbytes / peak) for s in samples]
    line = [f"{x:.1f},{y:.2f}" for x, y in _steps(points)]
    area = " ".join([f"{points[0][0]:.1f},100", *line, f"{points[-1][0]:.1f},100"])
    range_text = f"peak {format_bytes(peak)}, from {format_bytes(first)} to {format_bytes(last)}"
    drawing = (
        '<svg viewBox="0 0 1000 104" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(title)}: {escape(range_text)}">'
        f'<polygon points="{area}"/><polyline points="{" ".join(line)}"/></svg>'
        f'<div class="axis"><span>0 s</span><span>{_seconds(end)}</span></div>'
    )
    return _captioned(title, range_text, drawing)


def _captioned(title: str, text: str, drawing: str) -> str:
    caption = f"<b>{escape(title)}</b> <span>{escape(text)}</span>"
    return f'<figure class="curve"><figcaption>{caption}</figcaption>{drawing}</figure>'


def _steps(points: Sequence[tuple[float, float]]) -> Iterable[tuple[float, float]]:
    """Yield the corners of a curve that keeps each value until the next one."""
    yield points[0]
    for (_, before), (x, y) in pairwise(points):
        yield x, before
        yield x, y


def _parts(record: RunRecord) -> Iterable[str]:
    parts = step_parts(record)
    total = sum(part.seconds for part in parts)
    yield table(
        ("what the loop does", "per step", "of the time", "beside updates", "beside transfers"),
        [
            (
                part.name,
                _seconds(part.seconds),
                f"{part.seconds / total:.1%}",
                _seconds(part.beside_updates),
                _seconds(part.beside_transfers),
            )
            for part in parts
        ],
    )
    yield faint(
        "Waiting counts for the first of these in progress: an update, a read, a write, a copy."
        " Reads count only if no update hides them: that is the time that a faster disk saves."
    )


def _lanes(record: RunRecord) -> Iterable[str]:
    figures = lane_figures(record)
    if not figures:
        yield "<p>Nothing moved.</p>"
        return
    yield table(
        ("lane", "busy per step", "bytes per step", "while busy", "hidden by the model"),
        [
            (
                lane.lane,
                _seconds(lane.seconds),
                format_bytes(lane.nbytes) if lane.nbytes else "",
                f"{lane.rate / 1e9:.2f} GB/s" if lane.nbytes else "",
                f"{lane.beside:.0%}",
            )
            for lane in figures
        ],
    )
    yield faint(
        "Hidden by the model: the share of a lane's time during forward and backward, when the loop"
        " does not wait for it."
    )


def _bytes(record: RunRecord) -> Iterable[str]:
    moved = {name: nbytes for name, nbytes in record.moved.items() if nbytes}
    if not moved:
        yield "<p>Nothing was moved.</p>"
        return
    steps = max(record.steps, 1)
    columns = 3 if record.steps else 2
    rows = [(name, format_bytes(n), format_bytes(n // steps)) for name, n in moved.items()]
    yield table(("what", "bytes", "per step")[:columns], [row[:columns] for row in rows])
    per_step = record.written / record.steps if record.steps else 0.0
    step = median_step(record)
    if per_step:
        wear = f"Each step writes {per_step / 1e9:.3g} GB to disk"
        steps_per_terabyte = _TERABYTE / per_step
        wear += f": a terabyte of a drive's endurance (TBW) lasts {steps_per_terabyte:,.0f} steps"
        if step is not None:
            wear += f", or {steps_per_terabyte * step / 3600:,.1f} hours at this pace"
            wear += f" ({per_step * _DAY / step / _TERABYTE:.3g} TB written per day)"
        yield f"<p>{escape(wear)}.</p>"


def _plan(record: RunRecord) -> Iterable[str]:
    rows = []
    if record.predicted is not None:
        seconds, step = record.predicted.seconds, median_step(record)
        measured = "not recorded" if step is None else f"{step:.3g} s"
        difference = "" if step is None else f"{step / seconds - 1:+.1%}"
        label = f"a step, bound by {record.predicted.binding}"
        rows.append((label, f"{seconds:.3g} s", measured, difference))
    for item in record.compared:
        measured, difference = "not measured separately", ""
        if item.measured is not None:
            measured = format_bytes(item.measured)
            difference = f"{item.measured / item.predicted - 1:+.1%}" if item.predicted else ""
        rows.append(
            (f"{item.tier} {item.purpose}", format_bytes(item.predicted), measured, difference)
        )
    yield table(("what", "predicted", "measured", "difference"), rows)


def _log(record: RunRecord) -> dict[str, Any]:
    lanes = [
        (lane, [span for span in record.spans if span.lane == lane]) for lane in record.lanes()
    ]
    whole = (0.0, 1.01 * max(record.seconds, *(span.stop for span in record.spans)))
    views = [("whole recording", *whole)]
    calls = [span for span in record.of(COMPUTE) if span.name == STEP]
    if len(calls) > 1:
        start, stop = calls[-2].stop, calls[-1].stop
        margin = 0.05 * (stop - start)
        views.append((f"step {len(calls)}", start - margin, stop + margin))
    if calls:
        start, stop, seconds = calls[-1].start, calls[-1].stop, calls[-1].seconds
        views.append(("opt.step()", start - 0.1 * seconds, stop + 0.2 * seconds))
    return log_of([LogRow("", lanes)], whole, views)


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def _peak(samples: Sequence[Sample]) -> int:
    return max((sample.nbytes for sample in samples), default=0)


def _json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, separators=None if indent else (",", ":"))
