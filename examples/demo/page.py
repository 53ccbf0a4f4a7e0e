"""report.html: results, tables, plots and the event log in one self-contained page."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from demo.configurations import CONFIGURATIONS
from demo.parity import SHOWN, ParityReport
from demo.plots import Plot
from demo.result import DISK_LANES, RunResult, by_key
from demo.table import sections
from demo.timeline import shown_call, shown_step
from tensorstow.report.page import LOG_VIEW, LogRow, definitions, document, faint, log_of, table
from tensorstow.report.spans import COMPUTE

_TEMPLATE = Path(__file__).with_name("page.html")
_LANES = (COMPUTE, *DISK_LANES)


class Plots(NamedTuple):
    """The two plots of the page."""

    timeline: Plot
    memory: Plot


def compose(
    results: Sequence[RunResult], heading: str, parity: ParityReport, plots: Plots, lines: str
) -> str:
    """Return the page; ``lines`` is the example code."""
    template = Template(_TEMPLATE.read_text(encoding="utf-8"))
    body = template.substitute(
        heading=escape(heading),
        parity=_parity_sentence(parity),
        rows=definitions((row.name, row.about) for row in CONFIGURATIONS),
        tables=_tables(results),
        memory=_both(plots.memory),
        timeline=_both(plots.timeline),
        lines=escape(lines.strip()),
        view=LOG_VIEW,
    )
    return document("tensorstow demo", body, _log(results))


def _both(picture: Plot) -> str:
    return f'<div class="broad">{picture.wide}</div><div class="narrow">{picture.narrow}</div>'


def _parity_sentence(parity: ParityReport) -> str:
    first, *rest = parity.sentences()
    outcome = "equal" if parity.is_equal else "different"
    facts = parity.circumstances
    if parity.is_equal and (facts.is_busy or facts.is_noisy):
        outcome = "doubtful"
    said = "".join(f"<p>{escape(sentence)}</p>" for sentence in rest)
    return f'<div class="parity {outcome}"><p class="cost">{escape(first)}</p>{said}</div>'


def _tables(results: Sequence[RunResult]) -> str:
    heads = ["", *(row.title for row in CONFIGURATIONS)]
    return "\n".join(
        f"<h3>{escape(section.title)}</h3>{faint(section.note)}"
        + table(heads, ((line.label, *line.cells) for line in section.lines))
        for section in sections(results)
    )


def _log(results: Sequence[RunResult]) -> dict[str, Any]:
    """Return the data that the page's script draws."""
    runs = by_key(results)
    step = shown_step(results)
    shown = [runs[row.key].step_span(step) for row in CONFIGURATIONS if row.is_offloaded]
    begin, end = min(s.start for s in shown), max(s.stop for s in shown)
    close = next(row for row in CONFIGURATIONS if row.key == SHOWN)
    call = runs[close.key].optimizer_span(shown_call(results))
    margin = 0.1 * call.seconds
    whole = (0.0, 1.01 * max(span.stop for result in results for span in result.spans))
    views = [
        ("whole run", *whole),
        (f"step {step + 1}", begin, end),
        (f"opt.step() of {close.name}", call.start - margin, call.stop + 2 * margin),
    ]
    rows = [
        LogRow(row.name, [(lane, runs[row.key].lane(lane)) for lane in _LANES])
        for row in CONFIGURATIONS
    ]
    return log_of(rows, whole, views)
