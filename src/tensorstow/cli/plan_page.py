"""`tensorstow plan --html`: the tiers and the phases of a step as one self-contained page."""

from collections.abc import Iterator
from html import escape
from typing import Any

from tensorstow.base.sizes import format_bytes
from tensorstow.cli.plan_output import (
    describe,
    other_placements,
    rates_in_words,
    seconds_of_step,
    show_seconds,
)
from tensorstow.planner.placement import HEADROOM
from tensorstow.report.page import definitions, document, faint

_COLORS = (
    "#2f7fb5", "#cf8a1d", "#1f9484", "#a9659f", "#6f953c", "#c4553f", "#6c7fa6", "#8a919c",
)  # fmt: skip
_FREE = "repeating-linear-gradient(45deg,#8a919c66 0 4px,transparent 4px 8px)"
"""Stripes: nothing of a run is there."""
_LABELLED = 15
"""Per cent of a step: a shorter phase has no room for its name."""
_LANE_COLORS = {
    "cores": "#6c7fa6",
    "accelerator": "#6f953c",
    "disk": "#2f7fb5",
    "link up": "#cf8a1d",
    "link down": "#1f9484",
    "network": "#8a5fa8",
}


def compose(facts: dict[str, Any]) -> str:
    """Return the page of what ``plan.examine`` returned."""
    name = facts["model"]["name"]
    rates = rates_in_words(facts)
    body = [
        f"<h1>The plan of {escape(name)}</h1>",
        definitions(describe(facts)),
        "<h2>Memory of one rank</h2>",
        *_tiers(facts),
        "<h2>One step</h2>",
        *([] if rates is None else [faint(f"Rates are {rates}.")]),
        *_timeline(facts),
        "<h2>Other placements</h2>",
        definitions(other_placements(facts, everything=True)),
        "<h2>To run it</h2>",
        f"<pre>{escape(chr(10).join(facts['code']))}</pre>",
    ]
    return document(f"tensorstow plan: {name}", "\n".join(body))


def _tiers(facts: dict[str, Any]) -> Iterator[str]:
    """Yield a bar for each tier that holds something; its length is the budget."""
    purposes = list(dict.fromkeys(item["what"] for item in facts["held"]))
    color = {purpose: _COLORS[turn % len(_COLORS)] for turn, purpose in enumerate(purposes)}
    color[HEADROOM] = _FREE
    for tier, total in facts["tiers"].items():
        items = [item for item in facts["held"] if item["tier"] == tier]
        if not items:
            continue
        limit = total["budget"]
        whole = max(limit or 0, total["bytes"])
        most = "no limit" if limit is None else format_bytes(limit)
        yield f"<h3>{tier.upper()}: {format_bytes(total['bytes'])} of {most}</h3>"
        parts = (_part(item, whole, color) for item in items)
        yield f'<div class="bar">{"".join(parts)}</div>'
        labels = (
            f'<li><i style="background:{color[item["what"]]}"></i>'
            f"{escape(item['what'])} {format_bytes(item['bytes'])}</li>"
            for item in items
        )
        yield f'<ul class="items">{"".join(labels)}</ul>'


def _part(item: dict[str, Any], whole: int, color: dict[str, str]) -> str:
    share = 100 * item["bytes"] / whole
    title = escape(f"{item['what']}: {format_bytes(item['bytes'])}", quote=True)
    return (
        f'<span title="{title}" style="width:{share:.3f}%;background:{color[item["what"]]}"></span>'
    )


def _timeline(facts: dict[str, Any]) -> Iterator[str]:
    """Yield a lane for each resource: the share of each phase that it works."""
    step = facts["step"]
    if step is None:
        why = facts["seconds_unknown"] or f"give {facts['trace_with']}"
        yield faint(f"Not predicted: {why}.")
        return
    total = seconds_of_step(facts).capitalize()
    bound = f"<em>{escape(step['binding'])}</em>"
    yield f"<p>{total}; most of it waits for {bound}. A lane shows its work in each phase.</p>"
    phases = step["phases"]
    widths = [100 * phase["seconds"] / step["seconds"] for phase in phases]
    names = (
        f"{escape(phase['name'])} {show_seconds(phase['seconds'])}" if width > _LABELLED else ""
        for phase, width in zip(phases, widths, strict=True)
    )
    marks = (
        f'<span title="{name}" style="width:{width:.3f}%">{name}</span>'
        for name, width in zip(names, widths, strict=True)
    )
    yield f'<div class="lane"><span></span><div class="marks">{"".join(marks)}</div></div>'
    for lane, busy in step["busy"].items():
        cells = []
        for phase, width in zip(phases, widths, strict=True):
            share = 100 * phase["busy"].get(lane, 0.0) / phase["seconds"]
            inner = f'<span style="width:{share:.3f}%;background:{_LANE_COLORS[lane]}"></span>'
            cells.append(f'<span class="cell" style="width:{width:.3f}%">{inner}</span>')
        label = f"{escape(lane)} {show_seconds(busy)}"
        yield f'<div class="lane"><span>{label}</span><div class="bar">{"".join(cells)}</div></div>'
