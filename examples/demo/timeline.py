"""timeline.png: computation and disk transfers over time, for states on disk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from demo.configurations import CONFIGURATIONS
from demo.palette import style_axes, write_heading
from demo.result import DISK_LANES, RunResult, by_key
from tensorstow.report.palette import INK, SPAN_COLORS, SPAN_INKS
from tensorstow.report.spans import COMPUTE, TimeSpan, stack

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import PathPatch

LANES = (COMPUTE, *DISK_LANES)
_BAR = 0.78
_NAMED = 0.12
"""Bars that fill this much of a panel have their name in them."""
_OFFLOADED = [row for row in CONFIGURATIONS if row.is_offloaded]


@dataclass(frozen=True, slots=True)
class View:
    """What a panel shows: from ``start`` to ``stop``, in seconds after ``zero``."""

    zero: float
    start: float
    stop: float
    scale: float
    """Units of the panel's axis per second."""

    @property
    def width(self) -> float:
        """Return the length of the panel's axis."""
        return (self.stop - self.start) * self.scale

    def visible(self, spans: Sequence[TimeSpan]) -> list[TimeSpan]:
        """Return the parts of ``spans`` that show, on the panel's axis."""
        cut = [
            (max(s.start - self.zero, self.start), min(s.stop - self.zero, self.stop), s)
            for s in spans
        ]
        return [
            replace(span, start=start * self.scale, stop=stop * self.scale)
            for start, stop, span in cut
            if start < stop
        ]


def draw(results: Sequence[RunResult], *, narrow: bool = False) -> "Figure":
    """Return the figure: one training step of each configuration, and its opt.step() in detail.

    The detail is at the right, or below if the figure is ``narrow``, for phones.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415  # the demo extra

    runs = by_key(results)
    shown = shown_step(results)
    count = len(_OFFLOADED)
    size, columns = ((4.6, 19.0), 1) if narrow else ((13.0, 13.6), 2)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    grid = figure.subplots(2 * count // columns, columns, squeeze=False).reshape(-1)
    longest_step = max(runs[row.key].step_span(shown).seconds for row in _OFFLOADED)
    calls = {row.key: runs[row.key].optimizer_span(shown_call(results)) for row in _OFFLOADED}
    longest_call = max(call.seconds for call in calls.values())
    for whole, close, row in zip(grid[::2], grid[1::2], _OFFLOADED, strict=True):
        result = runs[row.key]
        begin, call = result.step_span(shown).start, calls[row.key]
        _lanes(whole, result, View(begin, -0.01 * longest_step, 1.08 * longest_step, 1.0))
        whole.set_title(row.name, loc="left", fontsize=11, fontweight="bold", color=INK)
        _lanes(close, result, View(call.start, -0.12 * longest_call, 1.18 * longest_call, 1e3))
        took = f"opt.step() takes {call.seconds * 1e3:,.0f} ms"
        close.set_title(took, loc="left", fontsize=11, color=INK)
        for moment in (0.0, call.seconds * 1e3):
            close.axvline(moment, color=INK, linewidth=0.8, linestyle=(0, (3, 3)))
        if narrow or row is _OFFLOADED[-1]:
            since = f"seconds since step {shown + 1} of {len(results[0].losses)} began"
            whole.set_xlabel(since, color=INK)
            close.set_xlabel("milliseconds since opt.step() was called", color=INK)
    heading = "Optimizer states on disk: one training step,", "and its opt.step() up close"
    write_heading(figure, heading, narrow=narrow)
    return figure


def shown_step(results: Sequence[RunResult]) -> int:
    """Return the last steady step; the first step if there is none."""
    return max(results[0].steady_steps, default=0)


def shown_call(results: Sequence[RunResult]) -> int:
    """Return the step whose opt.step() is shown in detail, the one before the shown step."""
    return max(0, shown_step(results) - 1)


def _lanes(axes: "Axes", result: RunResult, view: View) -> None:
    """Draw all lanes within ``view``."""
    for number, lane in enumerate(LANES):
        placed = stack(view.visible(result.lane(lane)))
        height = _BAR / (1 + max((level for _, level in placed), default=0))
        bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
        for span, level in placed:
            bars.setdefault((span.name, level), []).append((span.start, span.seconds))
            if span.name in SPAN_INKS and span.seconds > _NAMED * view.width:
                _name_bar(axes, span, number)
        for (name, level), extents in bars.items():
            low = number - _BAR / 2 + level * height
            axes.add_patch(_bars(extents, low, low + height * 0.94, SPAN_COLORS[name]))
    axes.set_xlim(view.start * view.scale, view.stop * view.scale)
    axes.set_ylim(len(LANES) - 0.45, -0.55)
    axes.set_yticks(range(len(LANES)), LANES, color=INK)
    axes.tick_params(axis="y", length=0)
    style_axes(axes, "x")


def _bars(
    extents: Sequence[tuple[float, float]], low: float, high: float, color: str
) -> "PathPatch":
    """Return bars of one colour as one shape, since a plot has thousands of them."""
    from matplotlib.patches import PathPatch  # noqa: PLC0415  # the demo extra
    from matplotlib.path import Path  # noqa: PLC0415

    corners = [
        (x, y)
        for start, width in extents
        for x, y in (
            (start, low), (start + width, low), (start + width, high), (start, high), (start, low)
        )
    ]  # fmt: skip
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(extents)
    # An edge of its own colour keeps bars visible that are narrower than a pixel.
    return PathPatch(Path(corners, codes), facecolor=color, edgecolor=color, linewidth=0.3)


def _name_bar(axes: "Axes", span: TimeSpan, number: int) -> None:
    axes.text(
        span.start + span.seconds / 2,
        number,
        span.name,
        ha="center",
        va="center",
        fontsize=9,
        color=SPAN_INKS[span.name],
    )
