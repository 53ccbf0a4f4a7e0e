import re

from tensorstow.report.palette import SPAN_COLORS, SPAN_INKS


def test_colours_are_colours_of_what_is_drawn() -> None:
    assert SPAN_INKS.keys() <= SPAN_COLORS.keys()
    for color in (*SPAN_COLORS.values(), *SPAN_INKS.values()):
        assert re.fullmatch("#[0-9a-f]{6}", color)
