import struct

import pytest
from demo_results import make_results

from demo.plots import draw_memory

pytest.importorskip("matplotlib")


def test_it_is_a_wide_png() -> None:
    picture = draw_memory(make_results()).png
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > height > 1000
