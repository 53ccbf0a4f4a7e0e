"""The colour of each configuration of the demo, and the look that its plots share."""

from typing import TYPE_CHECKING, Literal

from tensorstow.report.palette import FAINT, GRID, INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_COLORS = {
    "torch": "#8a919c",
    "ram": "#6c7fa6",
    "naive": "#a9659f",
    "half": "#6f953c",
    "full": "#2f7fb5",
    "forward": "#cf8a1d",
    "backward": "#1f9484",
    "stow": "#c4553f",
}


def write_heading(figure: "Figure", lines: tuple[str, str], *, narrow: bool) -> None:
    """Write the heading of a figure, on one line if it is not for phones."""
    text, size = ("\n".join(lines), 12) if narrow else (" ".join(lines), 14)
    figure.suptitle(text, fontsize=size, fontweight="bold", color=INK)


def style_axes(axes: "Axes", grid: Literal["x", "y"]) -> None:
    """Draw the lower axis and a faint grid along the axis ``grid``, and nothing else."""
    axes.grid(axis=grid, color=GRID)
    axes.set_axisbelow(True)
    axes.tick_params(colors=FAINT, labelcolor=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
