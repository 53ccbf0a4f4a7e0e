"""Made-up records of runs, for tests of what is made of them."""

from tensorstow.report.run_record import RunRecord
from tensorstow.report.spans import COMPUTE, TimeSpan
from tensorstow.states.memory import StateMemory
from tensorstow.states.traffic import Traffic

READ, WRITE = "read (/nvme)", "write (/nvme)"


def make_record(spans: list[TimeSpan], seconds: float = 10.0, **changes: object) -> RunRecord:
    given = {
        "title": "a <run>",
        "spans": spans,
        "held": {},
        "seconds": seconds,
        "moved": {"states read": 8 << 20, "states written": 4 << 20, "weights written": 0},
        "written": 4 << 20,
        "memory": StateMemory(1, 1, 1, 1, 1),
        "traffic": Traffic(0, 0, 0, 0, 0.0),
        "disk_bytes": 5,
    }
    return RunRecord(**{**given, **changes})


def step(start: float, number: int) -> list[TimeSpan]:
    """Return a step of 2 s forward, 2 s backward and 1 s of opt.step."""
    return [
        TimeSpan(COMPUTE, "forward", start, start + 2, number),
        TimeSpan(COMPUTE, "backward", start + 2, start + 4, number),
        TimeSpan(COMPUTE, "opt.step", start + 4, start + 5, number),
    ]


STEPS = [*step(0, 0), *step(5, 1)]
