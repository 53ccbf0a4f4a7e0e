import json

from demo_results import make_results

from demo.configurations import CONFIGURATIONS
from demo.events import LANES, trace

LOG = json.loads(json.dumps(trace(make_results())))
EVENTS = LOG["traceEvents"]


def test_every_row_is_a_named_process() -> None:
    names = {e["pid"]: e["args"]["name"] for e in EVENTS if e["name"] == "process_name"}
    assert names == {pid: row.name for pid, row in enumerate(CONFIGURATIONS)}


def test_every_lane_of_an_offloaded_row_is_there() -> None:
    full = [row.key for row in CONFIGURATIONS].index("full")
    assert {e["cat"] for e in EVENTS if e["pid"] == full and "cat" in e} == set(LANES)


def test_times_are_microseconds() -> None:
    step = next(e for e in EVENTS if e["name"] == "opt.step" and e["args"]["step"] == 1)
    assert (step["ph"], step["ts"], step["dur"]) == ("X", 7.0e6, 0.5e6)


def test_asynchronous_events_come_in_pairs() -> None:
    begun = {e["id"]: e for e in EVENTS if e["ph"] == "b"}
    ended = {e["id"]: e for e in EVENTS if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert len(begun) == sum(e["ph"] == "b" for e in EVENTS)
    for identity, begin in begun.items():
        end = ended[identity]
        assert begin["ts"] <= end["ts"]
        assert [begin[k] for k in ("cat", "name", "pid")] == [
            end[k] for k in ("cat", "name", "pid")
        ]


def test_memory_is_a_counter() -> None:
    counters = [e for e in EVENTS if e["ph"] == "C" and e["pid"] == 0]
    assert len(counters) == 60
    assert counters[0]["args"] == {"MiB": 100.0}


def test_results_are_kept_beside() -> None:
    assert set(LOG["otherData"]) == {row.key for row in CONFIGURATIONS}
    assert "spans" not in LOG["otherData"]["full"]
    assert LOG["otherData"]["full"]["checksum"] == "1" * 64
