"""Draws what ``delayed`` measured: two loss curves, and where the warm-up ends."""

import json
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from benchmarks.cpu.lecture_picture import style
from tensorstow.report.palette import GRID, INK, PAPER, SPAN_COLORS

_COLORS = {"exact": SPAN_COLORS["backward"], "delayed": SPAN_COLORS["update"]}


def draw(results: Path) -> Path:
    """Draw the saved curves of ``results`` to an SVG file beside it, and return its path."""
    document = json.loads(results.read_text(encoding="utf-8"))
    details = [figure["detail"] for figure in document["figures"]]
    curves = dict(zip(_COLORS, [d for d in details if "losses" in d], strict=True))
    figure = Figure(figsize=(7.0, 3.2), layout="constrained", facecolor=PAPER)
    axes = figure.subplots()
    warmup = curves["delayed"]["warmup_steps"]
    axes.axvline(warmup, color=GRID)
    top = axes.get_xaxis_transform()  # y is a share of the height
    axes.text(warmup, 1, " end of the warm-up", color=INK, va="top", fontsize=9, transform=top)
    for way, color in _COLORS.items():
        losses = curves[way]["losses"]
        axes.plot(range(1, len(losses) + 1), losses, color=color, label=way, linewidth=1.2)
    axes.set_xlabel("step", color=INK)
    axes.set_ylabel("loss", color=INK)
    axes.legend(frameon=False)
    style(axes)
    path = results.with_suffix(".svg")
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "delayed"}):
        figure.savefig(path, metadata={"Date": None, "Creator": None})
    return path
