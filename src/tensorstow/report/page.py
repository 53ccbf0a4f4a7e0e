"""Self-contained pages: a style, a body, and an event log that moves and zooms."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from tensorstow.report.palette import SPAN_COLORS, SPAN_INKS
from tensorstow.report.spans import Interval, TimeSpan

_HERE = Path(__file__).parent
LOG_VIEW = """\
<div id="bar"></div>
<div id="view"><canvas></canvas><div id="tip"></div></div>
<noscript><p>This view needs JavaScript; the rest of the page does not.</p></noscript>"""
"""Where the script of a page draws its event log."""


@dataclass(frozen=True, slots=True)
class LogRow:
    """One run of an event log: a title, and spans by lane."""

    title: str
    lanes: Sequence[tuple[str, Sequence[TimeSpan]]]


def document(title: str, body: str, log: dict[str, Any] | None = None) -> str:
    """Return a page that needs no other file.

    Args:
        title: The title of the page, as plain text.
        body: HTML. It contains ``LOG_VIEW`` if the page has a log.
        log: The result of ``log_of``.
    """
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    log_html = ""
    if log is not None:
        values = json.dumps(log, separators=(",", ":")).replace("</", "<\\/")
        script = (_HERE / "log_view.js").read_text(encoding="utf-8")
        log_html = (
            f'<script id="log" type="application/json">{values}</script>\n'
            f"<script>\n{script}</script>\n"
        )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n{body}\n{log_html}</body>\n</html>\n"
    )


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of texts; a row whose label begins with a space is a part of the one above."""
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    lines = [f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>']
    for label, *texts in rows:
        inner = ' class="of"' if label.startswith(" ") else ""
        cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
        lines.append(f"<tr><th{inner}>{escape(label.strip())}</th>{cells}</tr>")
    return "\n".join([*lines, "</tbody></table></div>"])


def definitions(texts: Iterable[tuple[str, str]]) -> str:
    """Return a list of labels and texts."""
    items = (f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in texts)
    return f"<dl>{''.join(items)}</dl>"


def faint(text: str) -> str:
    """Return a paragraph of help."""
    return f'<p class="faint">{escape(text)}</p>'


def log_of(
    rows: Sequence[LogRow], whole: Interval, views: Sequence[tuple[str, float, float]]
) -> dict[str, Any]:
    """Return the data that a page's script draws.

    ``whole`` is the interval to show first, in seconds. ``views`` are the buttons: name, start and
    stop of the interval that each shows.
    """
    lanes = [
        {
            "title": row.title,
            "lanes": [
                {"name": name, "spans": [_span(span) for span in spans]}
                for name, spans in row.lanes
                if spans
            ],
        }
        for row in rows
    ]
    span_names = {span.name for row in rows for _, spans in row.lanes for span in spans}
    return {
        "rows": lanes,
        "colors": {name: color for name, color in SPAN_COLORS.items() if name in span_names},
        "inks": SPAN_INKS,
        "whole": whole,
        "views": views,
    }


def _span(span: TimeSpan) -> dict[str, Any]:
    return {
        "name": span.name,
        "start": round(span.start, 6),
        "stop": round(span.stop, 6),
        "chunk": span.chunk,
        "nbytes": span.nbytes,
    }
