import errno
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.scratch import read_scratch, write_scratch
from tensorstow import AdamW, _native
from tensorstow.base.errors import DamageError, PoisonedError, TransferError
from tensorstow.formats.reference import AdamScalars, AdamState, adam_reference, adam_scalars
from tensorstow.states.chunks import ChunkRing
from tensorstow.states.layout import Family, RingPlan, parts_of, slot_bytes
from tensorstow.states.native_pipeline import StepKind, StepRow, UpdatePipeline
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement, StateStore

FP32 = Family(torch.float32, amsgrad=False)


def scalars_at(step: int) -> AdamScalars:
    return adam_scalars(
        lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1, step=step, decoupled=True
    )


@settings(deadline=None, max_examples=25)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=6),
    chunk=st.sampled_from([1024, 1056, 4096]),
    slots=st.integers(2, 5),
    fraction=st.sampled_from([0.4, 1.0]),
    missing=st.sets(st.integers(0, 17)),
    prefetch=st.booleans(),
)
def test_any_ring_gives_the_reference_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    chunk: int,
    slots: int,
    fraction: float,
    missing: set[int],
    prefetch: bool,  # noqa: FBT001
) -> None:
    directory = tmp_path_factory.getbasetemp()
    slot_bytes = 2 * (4 * chunk + 4096 + 3 * 4096)
    policy = PipelinePolicy(chunk_elements=chunk)
    store = StateStore(Placement(fraction, (directory,), slots * slot_bytes), policy)
    store.extend(sizes, [FP32] * len(sizes))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(n, generator=generator) for n in sizes]
    wanted = [w.clone() for w in weights]
    states = [AdamState(torch.zeros(n), torch.zeros(n)) for n in sizes]
    taken = [0] * len(sizes)
    for step in range(3):
        gradients = [torch.randn(n, generator=generator) for n in sizes]
        rows, table = [], []
        for i, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            if step * 6 + i in missing:
                rows.append(StepRow())
                continue
            taken[i] += 1
            row = StepRow(weight, gradient, scalars=len(table))
            rows.append(row)
            table.append(scalars_at(taken[i]))
            adam_reference(wanted[i], gradient, states[i], table[-1])
        if prefetch:
            store.pipeline.prefetch()
        if table:
            store.pipeline.step(rows, torch.tensor(table).numpy())
    back = store.read(range(len(sizes)))
    for i in range(len(sizes)):
        assert torch.equal(weights[i], wanted[i])
        assert torch.equal(back[i]["exp_avg"], states[i].m)
        assert torch.equal(back[i]["exp_avg_sq"], states[i].v)
    store.close()


def traced(
    *directories: Path, elements: int, backend: Literal["threads"] | None = None
) -> tuple[StateStore, Callable[[], None]]:
    """Return a store after a step, with a trace from now on, and a function that takes a step."""
    policy = PipelinePolicy(chunk_elements=4096, backend=backend)
    store = StateStore(Placement(1.0, directories, None), policy)
    store.extend([elements], [FP32])
    rows = [StepRow(torch.randn(elements), torch.randn(elements))]
    table = torch.tensor([scalars_at(1)]).numpy()

    def step() -> None:
        store.pipeline.step(rows, table)
        store.pipeline.wait_idle()

    step()
    store.pipeline.counters.start_trace()
    return store, step


def test_trace_has_every_chunk_in_every_lane(tmp_path: Path) -> None:
    store, step = traced(tmp_path, elements=20_000)
    before = time.monotonic()
    step()
    events = store.pipeline.counters.trace()
    for lane in ("read", "update", "write"):
        mine = [e for e in events if e.lane == lane]
        assert sorted(e.chunk for e in mine) == list(range(5))
        assert all(before <= e.start <= e.stop <= time.monotonic() for e in mine)
    assert sum(e.nbytes for e in events if e.lane == "read") == store.memory().file_bytes
    own = sorted((e.start, e.stop) for e in events if e.lane in {"update", "wait"})
    assert all(
        one[1] <= next_one[0] for one, next_one in itertools.pairwise(own)
    )  # all by the caller


def test_a_read_that_is_late_on_one_drive_holds_up_no_chunk_of_the_other(tmp_path: Path) -> None:
    directories = (tmp_path / "a", tmp_path / "b")
    for directory in directories:
        directory.mkdir()
    store, step = traced(*directories, elements=40_000, backend="threads")
    assert store.engine is not None
    store.engine.inject_fault("read", delay_us=500_000)
    step()
    events = store.pipeline.counters.trace()
    late = max((e for e in events if e.lane == "read"), key=lambda e: e.stop - e.start)
    updates = sorted((e.start, e.chunk) for e in events if e.lane == "update")
    assert len(updates) == 10
    assert updates[-1][1] == late.chunk
    assert updates[-2][0] < late.stop <= updates[-1][0]
    store.close()


def test_disk_and_update_are_no_faster_than_asked(tmp_path: Path) -> None:
    store, step = traced(tmp_path, elements=16_384, backend="threads")
    _native.slow_down(disk_bytes_per_s=8e6, update_elements_per_s=4e5)
    began = time.monotonic()
    try:
        step()
    finally:
        _native.slow_down()
    events = store.pipeline.counters.trace()
    updates = sorted((e.start, e.stop) for e in events if e.lane == "update")
    assert len(updates) == 4
    assert updates[-1][1] - began >= 16_384 / 4e5
    for before, after in itertools.pairwise(updates):
        assert after[0] >= before[1]
    moved = [e for e in events if e.lane in {"read", "write"}]
    took = max(e.stop for e in moved) - min(e.start for e in moved)
    assert took >= sum(e.nbytes for e in moved) / 8e6


def test_a_pipeline_before_connect_has_moved_nothing() -> None:
    pipeline = UpdatePipeline(PipelinePolicy())
    pipeline.wait_idle()
    pipeline.prefetch()
    assert pipeline.counters.traffic().bytes_read == 0
    assert pipeline.counters.trace() == []


# --- open steps, captures, steps in the background ---

CHUNK = 4096
SIZES = [3000, 5000, 4096, 100]


class Problem:
    """Weights of several parameters in shared chunks, and the same trained by the reference."""

    def __init__(self, directory: Path, slots: int = 2) -> None:
        budget = slots * slot_bytes(FP32, CHUNK, with_weights=False)
        policy = PipelinePolicy(chunk_elements=CHUNK)
        self.store = StateStore(Placement(1.0, (directory,), budget), policy)
        self.store.extend(SIZES, [FP32] * len(SIZES))
        self.pipeline = self.store.pipeline
        self.generator = torch.Generator().manual_seed(1)
        self.weights = [self.draw(n) for n in SIZES]
        self.wanted = [w.clone() for w in self.weights]
        self.states = [AdamState(torch.zeros(n), torch.zeros(n)) for n in SIZES]
        self.gradients: list[torch.Tensor] = []
        self.count = 0

    def draw(self, n: int) -> torch.Tensor:
        return torch.randn(n, generator=self.generator)

    def begin(self, kind: StepKind = StepKind(), *, due: Sequence[int] = range(4)) -> None:  # noqa: B008  # frozen
        self.count += 1
        self.gradients = [self.draw(n) for n in SIZES]
        rows = []
        for i, weight in enumerate(self.weights):
            gradient = self.gradients[i] if i in due and not kind.open else None
            expected = i in due and kind.open
            rows.append(StepRow(weight, gradient, expected=expected))
            if gradient is not None:
                self.expect(i)
        self.pipeline.step(rows, self.table(), kind)

    def table(self) -> npt.NDArray[np.float32]:
        return np.array([scalars_at(self.count)], dtype=np.float32)

    def expect(self, i: int) -> None:
        adam_reference(self.wanted[i], self.gradients[i], self.states[i], scalars_at(self.count))

    def arrive(self, i: int) -> None:
        self.expect(i)
        self.pipeline.add_gradient(i, self.gradients[i])

    def check(self) -> None:
        for ours, theirs in zip(self.weights, self.wanted, strict=True):
            assert torch.equal(ours, theirs)

    def check_states(self) -> None:
        back = self.store.read(range(len(SIZES)))
        for i, state in enumerate(self.states):
            assert torch.equal(back[i]["exp_avg"], state.m)
            assert torch.equal(back[i]["exp_avg_sq"], state.v)


@pytest.fixture
def problem(tmp_path: Path) -> Iterator[Problem]:
    made = Problem(tmp_path)
    yield made
    made.store.close()


@pytest.mark.parametrize("slots", [2, 4])
def test_gradients_land_in_any_order(tmp_path: Path, slots: int) -> None:
    problem = Problem(tmp_path, slots)
    for order in itertools.permutations(range(4)):
        problem.begin(StepKind(open=True))
        for i in order:
            assert not problem.pipeline.is_published(i)
            problem.arrive(i)
        problem.pipeline.close_step()
        problem.pipeline.wait_published()
        assert all(problem.pipeline.is_published(i) for i in range(4))
        problem.check()
    problem.check_states()
    problem.store.close()


def test_a_parameter_is_published_when_its_chunks_have_their_gradients(problem: Problem) -> None:
    # Elements of chunks: 0 and 1 | 1 and 2 | 2 and 3.
    assert [sorted(c.owners) for c in problem.store.chunks] == [[0, 1], [1, 2], [2, 3]]
    for _ in range(3):
        problem.begin(StepKind(open=True))
        problem.arrive(3)
        problem.arrive(2)
        assert not problem.pipeline.is_published(2)
        problem.pipeline.wait_parameters([3])
        assert torch.equal(problem.weights[3], problem.wanted[3])
        problem.arrive(1)
        problem.pipeline.wait_parameters([2, 3])
        assert torch.equal(problem.weights[2], problem.wanted[2])
        assert not problem.pipeline.is_published(1)
        problem.pipeline.close_step()  # and parameter 0 has none
        problem.pipeline.wait_parameters([0, 1])
        problem.check()
    problem.check_states()
    assert problem.pipeline.counters.traffic().chunks_updated == 9


def test_a_step_in_the_background_is_waited_for_by_whoever_needs_it(problem: Problem) -> None:
    waits = [
        problem.pipeline.wait_published,
        problem.pipeline.wait_written,
        problem.pipeline.wait_idle,
        lambda: problem.pipeline.wait_parameters(range(4)),
    ]
    for wait in waits * 2:
        problem.begin(StepKind(caller="computes"))
        wait()
        problem.check()
        problem.pipeline.wait_published()
    problem.check_states()


def test_a_commit_writes_states_and_weights_where_it_is_told(
    problem: Problem, tmp_path: Path
) -> None:
    """The scratch file's chunks have no room for weights: each goes to a place of its own here."""
    problem.begin()
    problem.pipeline.wait_idle()
    old = read_scratch(tmp_path)
    chunks = problem.store.chunks
    widths = [parts_of(FP32, c.plan.elements)[-1] for c in chunks]
    places = problem.store.storage.reserve([w.file_at + w.nbytes for w in widths])
    # A slot of this ring ends with the states: give it one that has room for the weights.
    wide = slot_bytes(FP32, CHUNK, with_weights=True)
    ring = ChunkRing(RingPlan(2, wide))
    problem.pipeline.connect(
        problem.store.storage.open_engine(), ring, [], [], problem.store.storage.path
    )
    for chunk, place in zip(chunks, places, strict=True):
        problem.pipeline.stored.target(chunk, place)
        problem.pipeline.handle.live().forget_capture(next(chunk.owners))
    problem.begin(StepKind(capture=True), due=[0])
    problem.pipeline.wait_written()
    problem.check()
    states, commit = read_scratch(tmp_path)
    assert [states] == old  # the places before it are untouched
    for chunk, place, width in zip(chunks, places, widths, strict=True):
        assert problem.pipeline.stored.place(chunk) == place
        assert problem.pipeline.stored.captured(chunk)
        for run in chunk.plan.runs:
            start = place[1] + width.file_at + 4 * run.position
            saved = torch.frombuffer(
                bytearray(commit[start : start + 4 * run.count]), dtype=torch.float32
            )
            assert torch.equal(saved, problem.weights[run.parameter][run.start :][: run.count])
    problem.pipeline.wait_idle()


def test_a_byte_that_changed_on_disk_is_damage_and_poisons(
    problem: Problem, tmp_path: Path
) -> None:
    problem.begin()
    problem.pipeline.wait_idle()
    (content,) = read_scratch(tmp_path)
    spoilt = bytearray(content)
    spoilt[100] ^= 1
    write_scratch(tmp_path, [bytes(spoilt)])
    with pytest.raises(DamageError, match="at offset 0 of"):
        problem.store.read([0])
    problem.begin(StepKind(open=True), due=[0])
    problem.arrive(0)
    problem.pipeline.close_step()
    with pytest.raises(DamageError, match="at offset 0 of"):
        problem.pipeline.wait_published()
    with pytest.raises(PoisonedError):
        problem.begin()


def test_what_a_thread_behind_the_caller_met_is_told_to_the_caller_as_itself(
    problem: Problem,
) -> None:
    problem.begin()
    problem.pipeline.wait_idle()
    engine = problem.store.engine
    assert engine is not None
    engine.inject_fault("read", error=errno.EIO)
    problem.begin(StepKind(caller="computes"))
    with ThreadPoolExecutor(1) as executor:
        behind = executor.submit(problem.pipeline.wait_written).exception()
    assert isinstance(behind, TransferError)
    problem.pipeline.handle.poison(RuntimeError("what came of it"))
    with pytest.raises(TransferError) as caught:
        problem.pipeline.handle.live()
    assert caught.value is behind
    for _ in range(2):
        with pytest.raises(PoisonedError, match=r"before and its states .*: read of") as again:
            problem.pipeline.handle.live()
        assert again.value.__cause__ is behind


def test_what_no_open_step_expects_is_refused(problem: Problem) -> None:
    with pytest.raises(RuntimeError, match="no open step"):
        problem.pipeline.close_step()
    problem.begin(StepKind(open=True), due=[1])
    with pytest.raises(RuntimeError, match="no gradient of this parameter"):
        problem.pipeline.add_gradient(0, problem.gradients[0])
    problem.arrive(1)
    with pytest.raises(RuntimeError, match="no gradient of this parameter"):
        problem.pipeline.add_gradient(1, problem.gradients[1])
    problem.pipeline.close_step()
    problem.pipeline.wait_published()
    problem.check()


def test_a_change_is_what_a_chunk_or_another_thread_reports(problem: Problem) -> None:
    pipeline, chunks = problem.pipeline, problem.pipeline.caller_chunks
    seen = chunks.changes()
    with ThreadPoolExecutor(1) as executor:
        executor.submit(chunks.signal)
        chunks.wait_change(seen)
    problem.begin(StepKind(open=True), due=[1])
    seen = chunks.changes()
    problem.arrive(1)
    chunks.wait_change(seen)  # no close, and nobody signals: a chunk is updated
    pipeline.close_step()
    pipeline.wait_published()
    problem.check()


def test_a_small_step_in_ram_wakes_no_thread() -> None:
    """To wake one takes longer than the update of 16 elements."""
    others = set(_times_slept())
    weight = torch.nn.Parameter(torch.zeros(16))
    optimizer = AdamW([weight], lr=1e-2)
    weight.grad = torch.ones_like(weight)
    optimizer.step()  # the first one starts threads
    before = {task: times for task, times in _times_slept().items() if task not in others}
    assert before
    steps = 200
    for _ in range(steps):
        optimizer.step()
    after = _times_slept()
    assert all(after[task] - times < steps / 4 for task, times in before.items())


def _times_slept() -> dict[str, int]:
    """Return how often each thread of this process has slept, by its number."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            lines = (task / "status").read_text().splitlines()
            (slept,) = (line for line in lines if line.startswith("voluntary_ctxt"))
            found[task.name] = int(slept.split()[1])
    return found
