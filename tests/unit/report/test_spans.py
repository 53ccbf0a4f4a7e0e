import pytest

from tensorstow.report.spans import TimeSpan, length, shared, span_of, stack, union, without
from tensorstow.states.traffic import TraceEvent


def test_overlapping_spans_get_levels_of_their_own() -> None:
    spans = [TimeSpan("read", "read", a, b) for a, b in ((0, 4), (1, 2), (2, 3), (3.5, 5), (4, 6))]
    assert [level for _, level in stack(spans)] == [0, 1, 1, 1, 0]


def test_a_union_is_disjoint_and_in_order() -> None:
    assert union([(4, 5), (1, 2), (2, 3), (1.5, 1.7), (6, 6)]) == [(1, 3), (4, 5)]


@pytest.mark.parametrize(
    ("left", "right", "both", "rest"),
    [
        ([(0, 10)], [], [], [(0, 10)]),
        ([(0, 10)], [(2, 3), (5, 20)], [(2, 3), (5, 10)], [(0, 2), (3, 5)]),
        ([(0, 1), (4, 6)], [(0.5, 5)], [(0.5, 1), (4, 5)], [(0, 0.5), (5, 6)]),
        ([(3, 4)], [(0, 1), (5, 6)], [], [(3, 4)]),
        ([], [(0, 1)], [], []),
    ],
)
def test_times_are_shared_or_left(left: list, right: list, both: list, rest: list) -> None:
    assert shared(left, right) == both
    assert without(left, right) == rest
    assert length(both) + length(rest) == pytest.approx(length(left))


def test_an_event_of_the_pipeline_is_a_span() -> None:
    span = span_of(TraceEvent("read", 1.0, 3.0, 7, 4096), "read /nvme")
    assert (span.lane, span.name, span.seconds) == ("read /nvme", "read", 2.0)
    assert (span.chunk, span.nbytes, span.step) == (7, 4096, -1)
