"""Made-up results of every row of the demo, for tests of what is made of them."""

from dataclasses import replace

from demo.configurations import ANCHOR, CONFIGURATIONS, Configuration
from demo.crash import Crash
from demo.parity import ParityReport, judge
from demo.result import RunResult, UlpDifference
from demo.round_robin import turns_of
from tensorstow.cli.process import OPTIMIZER
from tensorstow.report.spans import COMPUTE, Sample, TimeSpan
from tensorstow.states.memory import StateMemory

PARTS = (("forward", 0.0, 1.0), ("backward", 1.0, 3.0), (OPTIMIZER, 3.0, 3.5))
STEP_SECONDS = 4.0
MIB = 1 << 20


CRASH = Crash(committed=1, steps=2, checksum="3" * 64)


def judged(
    results: list[RunResult], crash: Crash = CRASH, others: float | None = 0.02
) -> ParityReport:
    return judge(results, crash, others=others, at_once=True)


def make_results(steps: int = 3) -> list[RunResult]:
    return [make_result(row, steps) for row in CONFIGURATIONS]


def make_result(row: Configuration, steps: int = 3) -> RunResult:
    spans = []
    for step in range(steps):
        zero = STEP_SECONDS * step
        spans += [TimeSpan(COMPUTE, name, zero + a, zero + b, step) for name, a, b in PARTS]
        if row.is_offloaded:
            # Half of the first read is before opt.step(), half of the last write behind it.
            spans.append(TimeSpan("read", "read", zero + 2.9, zero + 3.1, chunk=0, nbytes=MIB))
            spans.append(TimeSpan("read", "read", zero + 3.0, zero + 3.2, chunk=1, nbytes=MIB))
            spans.append(TimeSpan("update", "update", zero + 3.2, zero + 3.3, chunk=0))
            spans.append(TimeSpan("write", "write", zero + 3.4, zero + 3.6, chunk=0, nbytes=MIB))
            spans.append(TimeSpan("wait", "wait", zero + 3.0, zero + 3.5))
    memory = StateMemory(MIB, MIB, 0, 0, 0)
    if row.is_offloaded:
        memory = StateMemory(MIB, 0, MIB, MIB, MIB)
    return RunResult(
        key=row.key,
        parameters=MIB // 8,
        losses=tuple(10.9 + 0.01 * step for step in range(steps)),
        checksum="1" * 64 if row.is_ours else "2" * 64,
        spans=tuple(spans),
        rss=tuple(Sample(0.05 * i, (100 + i) * MIB) for i in range(20 * steps)),
        peak_rss_bytes=200 * MIB,
        end_rss_bytes=90 * MIB if row.is_offloaded else 120 * MIB,
        predicted=None if row.optimizer == "stow" else memory,
        measured=memory,
        allocated_file_bytes=memory.file_bytes,
        bytes_read=2 * MIB * steps if row.is_offloaded else 0,
        bytes_written=MIB * steps if row.is_offloaded else 0,
        bytes_spared=MIB if row.schedule == "pipelined" and row.is_offloaded else 0,
        turns=tuple(turns_of(steps)),
        checksums=("3" * 64, "1" * 64) if row.key == ANCHOR else (),
        from_torch=UlpDifference(2.5, 0.25) if row.key == ANCHOR else None,
    )


def spoil(results: list[RunResult], key: str, **changes: object) -> list[RunResult]:
    return [replace(r, **changes) if r.key == key else r for r in results]
