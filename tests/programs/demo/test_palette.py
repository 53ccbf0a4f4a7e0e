import itertools
import re

from demo.configurations import CONFIGURATIONS
from demo.palette import ROW_COLORS
from demo.result import DISK_LANES
from tensorstow.report.palette import SPAN_COLORS, SPAN_INKS


def test_everything_that_is_drawn_has_a_colour() -> None:
    assert set(ROW_COLORS) == {row.key for row in CONFIGURATIONS}
    drawn = {"forward", "backward", "opt.step", "zero_grad", "last writes", *DISK_LANES}
    assert drawn <= SPAN_COLORS.keys()
    for color in (*ROW_COLORS.values(), *SPAN_COLORS.values(), *SPAN_INKS.values()):
        assert re.fullmatch("#[0-9a-f]{6}", color)


def test_names_are_legible_in_their_bars() -> None:
    for name, ink in SPAN_INKS.items():
        assert contrast(SPAN_COLORS[name], ink) > 2.5


def test_neighbouring_lanes_differ() -> None:
    for one, other in itertools.combinations(DISK_LANES, 2):
        assert SPAN_COLORS[one] != SPAN_COLORS[other]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
