"""The plots as files: PNG, and SVG whose colours are the page's variables."""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from demo.result import RunResult
from tensorstow.report.palette import FAINT, GRID, INK, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = {INK: "var(--ink)", FAINT: "var(--faint)", GRID: "var(--line)", PAPER: "var(--paper)"}
"""What a page gives a colour of its own, in the light and in the dark."""


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot as PNG, and as SVG for a wide page and for a phone."""

    png: bytes
    wide: str
    narrow: str


def plot_of(draw: Callable[..., "Figure"], results: Sequence[RunResult]) -> Plot:
    """Return what ``draw`` draws of the results, also if it is to be ``narrow``."""
    wide = draw(results)
    return Plot(png(wide), svg(wide), svg(draw(results, narrow=True)))


def png(figure: "Figure") -> bytes:
    """Return ``figure`` as PNG with light colours."""
    target = io.BytesIO()
    figure.savefig(target, format="png", facecolor=PAPER)
    return target.getvalue()


def svg(figure: "Figure") -> str:
    """Return ``figure`` as an SVG element that uses the page's colour variables."""
    import matplotlib as mpl  # noqa: PLC0415  # the demo extra

    target = io.StringIO()
    # Text stays text, which the page can be searched for; no date and no chance in the file.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "tensorstow"}):
        figure.savefig(target, format="svg", transparent=True, metadata={"Date": None})
    text = target.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"', "<svg", text)
    for color, variable in VARIABLES.items():
        text = text.replace(color, variable)
    return text
