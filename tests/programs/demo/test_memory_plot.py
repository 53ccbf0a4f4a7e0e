import struct

import pytest
from demo_results import make_results

from demo import memory_plot
from demo.plots import plot_of

pytest.importorskip("matplotlib")


def test_it_is_a_wide_png() -> None:
    picture = plot_of(memory_plot.draw, make_results()).png
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > height > 1000
