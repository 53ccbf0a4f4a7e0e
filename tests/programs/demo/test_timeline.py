import struct

import pytest
from demo_results import make_results

from demo import timeline
from demo.plots import plot_of
from demo.timeline import View, shown_call, shown_step
from tensorstow.report.spans import TimeSpan

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("steps", [1, 3])
def test_it_is_a_large_png(steps: int) -> None:
    picture = plot_of(timeline.draw, make_results(steps)).png
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width >= 1600
    assert height >= 1000


def test_a_steady_step_is_shown_and_the_call_before_it() -> None:
    shown = [(shown_step(r), shown_call(r)) for r in map(make_results, (1, 2, 3, 4))]
    assert shown == [(0, 0), (1, 0), (1, 0), (3, 2)]


def test_a_view_cuts_what_it_does_not_show() -> None:
    view = View(zero=10.0, start=-1.0, stop=2.0, scale=1e3)
    spans = [TimeSpan("read", "read", a, b) for a, b in ((8, 9), (8.5, 9.5), (11, 13), (12, 14))]
    assert [(s.start, s.stop) for s in view.visible(spans)] == [(-1000, -500), (1000, 2000)]
    assert view.width == 3000
