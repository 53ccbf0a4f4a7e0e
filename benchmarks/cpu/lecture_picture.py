"""Draws what ``lecture`` measured: bytes of each tier, and seconds of a step, way by way."""

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.cpu.lecture import WAYS
from tensorstow.report.palette import FAINT, GRID, INK, PAPER, SPAN_COLORS

_TIERS = {"memory": SPAN_COLORS["backward"], "disk": SPAN_COLORS["update"]}
_STEP = SPAN_COLORS["opt.step"]


def draw(results: Path) -> Path:
    """Draw the saved figures of ``results`` to an SVG file beside it, and return its path."""
    document = json.loads(results.read_text(encoding="utf-8"))
    values = {figure["name"]: figure["measured"] for figure in document["figures"]}
    figure = Figure(figsize=(9.0, 3.4), layout="constrained", facecolor=PAPER)
    left, right = figure.subplots(1, 2, sharey=True)
    starts = [0.0] * len(WAYS)
    for tier, color in _TIERS.items():
        sizes = [values[f"{way}: peak bytes, {tier}"] for way in WAYS]
        left.barh(list(WAYS), sizes, left=starts, color=color, label=tier)
        for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            if size:
                _note(left, start + size / 2, row, f"{size:,.0f}")
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
    left.set_xlabel("MiB at the peak", color=INK)
    left.legend(frameon=False, ncols=len(_TIERS), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    seconds = [values[f"{way}: seconds of a step"] for way in WAYS]
    right.barh(list(WAYS), seconds, color=_STEP)
    for row, value in enumerate(seconds):
        right.text(value, row, f" {value:.2f}", va="center", color=INK, fontsize=9)
    right.set_xlim(0, 1.15 * max(seconds))
    right.set_xlabel("seconds of a step", color=INK)
    left.invert_yaxis()  # the first way on top
    for axes in (left, right):
        style(axes)
    path = results.with_suffix(".svg")
    # Text stays text, and the same figures are the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "lecture"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    return path


def _note(axes: Axes, x: float, row: int, text: str) -> None:
    axes.text(x, row, text, ha="center", va="center", color=INK, fontsize=9)


def style(axes: Axes) -> None:
    """Give axes the look of this project's pictures."""
    axes.grid(axis="x", color=GRID)
    axes.set_axisbelow(True)
    axes.set_facecolor(PAPER)
    axes.tick_params(colors=FAINT, labelcolor=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
