"""Plots as parts of a page: in its colours, for wide ones and for phones."""

import re
import xml.etree.ElementTree as ET

import pytest
from demo_results import make_results

from demo import memory_plot
from demo.configurations import CONFIGURATIONS
from demo.plots import VARIABLES, Plot, plot_of

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def memory() -> Plot:
    return plot_of(memory_plot.draw, make_results())


@pytest.mark.parametrize("form", ["wide", "narrow"])
def test_it_is_an_element_in_the_colours_of_the_page(memory: Plot, form: str) -> None:
    text = getattr(memory, form)
    root = ET.fromstring(text)  # noqa: S314  # our own
    assert root.tag == "svg"
    assert "width" not in root.attrib  # the page says how wide
    for color, variable in VARIABLES.items():
        assert color not in text
        assert variable in text
    assert not re.search(r"https?://|#000000|white|black", text)


def test_text_is_text(memory: Plot) -> None:
    for row in CONFIGURATIONS:
        for piece in row.title.splitlines():
            assert piece in memory.narrow


def test_a_phone_gets_a_tall_one(memory: Plot) -> None:
    shapes = [
        re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', t) for t in (memory.wide, memory.narrow)
    ]
    (wide, low), (narrow, high) = (map(float, shape.groups()) for shape in shapes if shape)
    assert wide > low
    assert high > narrow
    assert narrow < 400
