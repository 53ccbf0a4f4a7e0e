"""memory.png: the resident memory of each row over time, side by side on one scale."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorstow.cli.demo.palette import FAINT, GRID, INK, ROW_COLORS
from tensorstow.cli.demo.result import RowResult, by_key
from tensorstow.cli.demo.rows import ROWS, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIB = 1 << 20


def draw(results: Sequence[RowResult]) -> bytes:
    """Return the picture as PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # the demo extra

    known = by_key(results)
    figure = Figure(figsize=(13, 4.6), dpi=150, layout="constrained")
    panels = figure.subplots(1, len(ROWS), sharey=True, squeeze=False)[0]
    top = max(_peak(result) for result in results) / _MIB
    for axes, row in zip(panels, ROWS, strict=True):
        _panel(axes, row, known[row.key], top)
    panels[0].set_ylabel("resident memory (RSS), MiB", color=INK)
    panels[0].set_ylim(0, top * 1.12)
    figure.supxlabel("seconds since the first step began", fontsize=10, color=INK)
    figure.suptitle(
        "Memory of the whole process, by where the optimizer states are",
        fontsize=14,
        fontweight="bold",
        color=INK,
    )
    target = io.BytesIO()
    figure.savefig(target, format="png")
    return target.getvalue()


def _peak(result: RowResult) -> int:
    return max(result.peak_rss_bytes, *(sample.nbytes for sample in result.rss))


def _panel(axes: "Axes", row: Row, result: RowResult, top: float) -> None:
    color = ROW_COLORS[row.key]
    times = [sample.time for sample in result.rss]
    sizes = [sample.nbytes / _MIB for sample in result.rss]
    axes.fill_between(times, sizes, color=color, alpha=0.22, linewidth=0)
    axes.plot(times, sizes, color=color, linewidth=1.4)
    peak, end = result.peak_rss_bytes / _MIB, result.end_rss_bytes / _MIB
    axes.axhline(peak, color=color, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.axhline(end, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    _note(axes, peak + 0.015 * top, f"peak {peak:,.0f}", color)
    _note(axes, end - 0.065 * top, f"at the end {end:,.0f}", INK)
    axes.set_title(row.title, fontsize=10.5, fontweight="bold", color=color)
    axes.set_xlim(0, 1.04 * max(times))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelcolor=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _note(axes: "Axes", height: float, text: str, color: str) -> None:
    """Write ``text`` at a height of the data, at the right."""
    axes.text(
        0.97,
        height,
        text,
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=color,
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
    )
