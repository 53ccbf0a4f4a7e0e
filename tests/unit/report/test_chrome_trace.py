import json

from tensorstow.report.chrome_trace import TracedProcess, events_of
from tensorstow.report.spans import Sample, TimeSpan

PROCESS = TracedProcess(3, "a run", ("compute", "read", "write"), frozenset({"compute"}))
SPANS = [
    TimeSpan("compute", "forward", 0.0, 1.0, step=0),
    TimeSpan("read", "read", 0.5, 1.5, chunk=2, nbytes=4096),
]
EVENTS = json.loads(json.dumps(list(events_of(PROCESS, SPANS, [("RSS", [Sample(0.25, 3 << 20)])]))))


def test_lanes_that_are_used_have_names() -> None:
    named = {e["tid"]: e["args"]["name"] for e in EVENTS if e["name"] == "thread_name"}
    assert named == {0: "compute", 1: "read"}


def test_serial_lanes_have_complete_events_and_others_pairs() -> None:
    found = [(e["ph"], e["cat"], e["ts"]) for e in EVENTS if "cat" in e]
    assert found == [("X", "compute", 0.0), ("b", "read", 0.5e6), ("e", "read", 1.5e6)]
    assert next(e for e in EVENTS if e["ph"] == "b")["args"] == {
        "step": -1,
        "chunk": 2,
        "bytes": 4096,
    }


def test_bytes_held_are_a_counter() -> None:
    counter = next(e for e in EVENTS if e["ph"] == "C")
    assert (counter["name"], counter["ts"], counter["args"]) == ("RSS", 0.25e6, {"MiB": 3.0})
    assert {e["pid"] for e in EVENTS} == {3}
