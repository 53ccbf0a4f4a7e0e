import pytest

from run_records import READ, STEPS, WRITE, make_record, step
from tensorstow.report.run_record import kind_of, lane_figures, median_step, stalls, step_parts
from tensorstow.report.spans import COMPUTE, TimeSpan


def test_a_lane_is_of_its_kind_wherever_it_is() -> None:
    record = make_record([TimeSpan(WRITE, "write", 0, 1), TimeSpan(READ, "read", 0, 1), *STEPS])
    assert kind_of(READ) == "read"
    assert kind_of("link down") == "link down"
    assert record.lanes() == [COMPUTE, READ, WRITE]
    assert len(record.of("read", "write")) == 2


def test_steps_are_counted_from_end_to_end() -> None:
    record = make_record(STEPS)
    assert (record.steps, record.step_seconds, median_step(record)) == (2, [5.0], 5.0)
    assert median_step(make_record(step(0, 0))) is None


def test_a_wait_counts_for_what_was_under_way() -> None:
    waited = [TimeSpan("wait", "wait", 4.0, 5.0), TimeSpan("wait", "wait", 9.0, 10.0)]
    busy = [
        TimeSpan("update (2 threads)", "update", 4.0, 4.2),
        TimeSpan(READ, "read", 3.0, 4.5),  # hidden by the update until 4.2, and before the wait
        TimeSpan(WRITE, "write", 4.4, 4.6),
        TimeSpan("link down", "link down", 9.0, 9.9),
    ]
    found = dict(stalls(make_record([*STEPS, *waited, *busy])))
    assert found == pytest.approx(
        {
            "copies from the accelerator": 0.9,
            "other": 0.5,
            "reads of states": 0.3,
            "updates (computation)": 0.2,
            "writes of states": 0.1,
        }
    )
    assert sum(found.values()) == pytest.approx(2.0)


def test_the_parts_of_a_step_sum_to_it_and_no_time_is_in_two() -> None:
    spans = [
        TimeSpan("wait", "wait", 4.0, 5.0),  # before the first step's end
        TimeSpan("wait", "wait", 9.0, 10.0),
        TimeSpan("update (2 threads)", "update", 8.0, 9.2),
        TimeSpan(READ, "read", 8.5, 9.5),
        TimeSpan("weights read (/nvme)", "read", 6.0, 6.5),
        TimeSpan("stall", "weights being read", 6.0, 6.5),
        TimeSpan("stall", "weights being read", 9.8, 10.2),  # the wait has a part of it
    ]
    record = make_record([*STEPS, *step(10.5, 2), *spans], seconds=20.0)
    parts = {part.name: part for part in step_parts(record)}
    assert {name: 2 * part.seconds for name, part in parts.items()} == pytest.approx(
        {
            "waiting: updates (computation)": 0.2,
            "waiting: reads of states": 0.3,
            "waiting: other": 0.5,
            "waiting: weights being read": 0.7,
            "forward": 2 * 2.0 - 0.5,
            "backward": 2 * 2.0,
            "opt.step": 1.0,
            "outside of these": 0.3,
        }
    )
    assert sum(part.seconds for part in parts.values()) == pytest.approx((15.5 - 5.0) / 2)
    assert 2 * parts["backward"].beside_updates == pytest.approx(1.0)  # from 8 to 9
    assert 2 * parts["backward"].beside_transfers == pytest.approx(0.5)
    assert 2 * parts["waiting: weights being read"].beside_transfers == pytest.approx(0.5)


@pytest.mark.parametrize("recorded", [step(0, 0), STEPS])
def test_a_loop_that_never_waits_has_its_phases_alone(recorded: list[TimeSpan]) -> None:
    parts = step_parts(make_record(recorded, seconds=recorded[-1].stop))
    assert [(part.name, part.seconds) for part in parts] == [
        ("forward", 2.0),
        ("backward", 2.0),
        ("opt.step", 1.0),
    ]


def test_stalls_beside_the_pipeline_have_their_own_names() -> None:
    spans = [TimeSpan("stall", "weights being read", 1.0, 1.5) for _ in range(2)]
    assert stalls(make_record([*STEPS, *spans])) == [("weights being read", 1.0)]


def test_a_lane_is_beside_the_model_where_the_loop_does_not_wait() -> None:
    spans = [
        TimeSpan(READ, "read", 1.0, 3.0, nbytes=100),
        TimeSpan(READ, "read", 2.0, 5.0, nbytes=300),
        TimeSpan("wait", "wait", 3.0, 3.5),
    ]
    (lane,) = lane_figures(make_record([*STEPS, *spans]))
    assert (lane.lane, lane.seconds, lane.nbytes) == (READ, 2.0, 200)
    assert lane.beside == pytest.approx(2.5 / 4.0)  # 1 to 3 and 3.5 to 4 of 1 to 5
    assert lane.rate == 100.0
