"""memory.png: the resident memory of each configuration over time, on one scale."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from demo.configurations import CONFIGURATIONS, Configuration
from demo.palette import ROW_COLORS, style_axes, write_heading
from demo.result import RunResult, by_key
from tensorstow.report.palette import INK, PAPER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIB = 1 << 20


def draw(results: Sequence[RunResult], *, narrow: bool = False) -> "Figure":
    """Return the figure; ``narrow`` for phones."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # the demo extra

    runs = by_key(results)
    columns, size = (2, (4.6, 9.4)) if narrow else (4, (13.0, 7.4))
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.subplots(len(CONFIGURATIONS) // columns, columns, sharey=True, squeeze=False)
    panels = grid.reshape(-1)
    top = max(_peak(result) for result in results) / _MIB
    for axes, row in zip(panels, CONFIGURATIONS, strict=True):
        _panel(axes, row, runs[row.key], top)
    panels[0].set_ylim(0, top * 1.16)
    figure.supylabel("resident memory (RSS), MiB", fontsize=10, color=INK)
    figure.supxlabel("seconds in its own turns", fontsize=10, color=INK)
    heading = "Memory of the whole process,", "by where the optimizer states are"
    write_heading(figure, heading, narrow=narrow)
    return figure


def _peak(result: RunResult) -> int:
    return max(result.peak_rss_bytes, *(sample.nbytes for sample in result.rss))


def _panel(axes: "Axes", row: Configuration, result: RunResult, top: float) -> None:
    color = ROW_COLORS[row.key]
    times = [sample.time for sample in result.rss]
    sizes = [sample.nbytes / _MIB for sample in result.rss]
    axes.fill_between(times, sizes, color=color, alpha=0.22, linewidth=0)
    axes.plot(times, sizes, color=color, linewidth=1.4)
    peak, end = result.peak_rss_bytes / _MIB, result.end_rss_bytes / _MIB
    axes.axhline(peak, color=color, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.axhline(end, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
    _note(axes, peak + 0.015 * top, f"peak {peak:,.0f}")
    _note(axes, end - 0.085 * top, f"at the end {end:,.0f}")
    axes.set_title(row.title, fontsize=10.5, fontweight="bold", color=INK)
    axes.set_xlim(0, 1.04 * max(times))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    style_axes(axes, "y")


def _note(axes: "Axes", height: float, text: str) -> None:
    """Write ``text`` at a height in the data's units, at the right."""
    axes.text(
        0.97,
        height,
        text,
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="bottom",
        fontsize=9.5,
        color=INK,
        bbox={"facecolor": PAPER, "edgecolor": "none", "alpha": 0.75, "pad": 1.0},
    )
