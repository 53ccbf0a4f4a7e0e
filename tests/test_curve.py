import struct

import pytest

from demo_results import make_results
from tensorstow.cli.demo.curve import draw

pytest.importorskip("matplotlib")


def test_it_is_a_wide_png() -> None:
    picture = draw(make_results())
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 2 * height > 1000
