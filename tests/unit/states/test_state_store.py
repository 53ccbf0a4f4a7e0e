import errno
import gc
import logging
import os
from pathlib import Path

import pytest
import torch

from process_counts import open_descriptors
from tensorstow.base.errors import (
    BudgetError,
    DirectoryError,
    ForkError,
    PoisonedError,
    TransferError,
)
from tensorstow.formats.reference import adam_scalars
from tensorstow.states.layout import Family
from tensorstow.states.memory import predict_memory
from tensorstow.states.native_pipeline import StepRow
from tensorstow.states.policy import PipelinePolicy
from tensorstow.states.state_store import Placement, StateStore

FP32 = Family(torch.float32, amsgrad=False)
BF16 = Family(torch.bfloat16, amsgrad=False)
SIZES = [5000, 3, 70_000, 0, 16]
SMALL = PipelinePolicy(chunk_elements=4096)
BUDGET = 1 << 20


def store_at(
    directory: Path,
    fraction: float = 1.0,
    *,
    budget: int | None = BUDGET,
    policy: PipelinePolicy = SMALL,
) -> StateStore:
    return StateStore(Placement(fraction, (directory,), budget), policy)


class Problem:
    """Weights and gradients for a store, and one step of it."""

    def __init__(self, sizes: list[int]) -> None:
        generator = torch.Generator().manual_seed(3)
        self.weights = [torch.randn(n, generator=generator) for n in sizes]
        self.gradients = [torch.randn(n, generator=generator) for n in sizes]
        self.count = 0

    def step(self, store: StateStore, without: tuple[int, ...] = ()) -> None:
        self.count += 1
        scalars = adam_scalars(
            lr=0.1, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1, step=self.count, decoupled=True
        )
        rows = [
            StepRow() if i in without else StepRow(w, g)
            for i, (w, g) in enumerate(zip(self.weights, self.gradients, strict=True))
        ]
        table = torch.tensor([scalars], dtype=torch.float32).numpy()
        store.pipeline.step(rows, table)


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_measured_memory_is_the_formula(tmp_path: Path, fraction: float) -> None:
    store = store_at(tmp_path, fraction)
    store.extend(SIZES, [FP32] * len(SIZES))
    predicted = predict_memory(
        [(FP32, SIZES)], disk_fraction=fraction, chunk_elements=4096, budget=BUDGET
    )
    assert store.memory() == predicted


def test_states_written_come_back(tmp_path: Path) -> None:
    store = store_at(tmp_path, 0.5)
    store.extend(SIZES, [FP32] * len(SIZES))
    states = {
        i: {"exp_avg": torch.randn(n), "exp_avg_sq": torch.rand(n)} for i, n in enumerate(SIZES)
    }
    store.put(states)
    back = store.read(range(len(SIZES)))
    for i, tensors in states.items():
        for name, tensor in tensors.items():
            assert torch.equal(back[i][name], tensor)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_only_the_parameters_given_are_set(tmp_path: Path, fraction: float) -> None:
    store = store_at(tmp_path, fraction)
    store.extend([100, 5000], [FP32] * 2)
    store.put({0: {"exp_avg": torch.ones(100)}, 1: {"exp_avg": torch.ones(5000)}})
    store.put({0: {"exp_avg_sq": torch.ones(100)}})
    back = store.read([0, 1])
    assert back[0]["exp_avg"].count_nonzero() == 0  # not named, so zero
    assert back[0]["exp_avg_sq"].sum() == 100
    assert back[1]["exp_avg"].sum() == 5000


def test_setting_nothing_leaves_blank_chunks_blank(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.extend([100], [FP32])
    store.put({0: {}})
    Problem([100]).step(store)
    store.pipeline.wait_idle()
    assert store.pipeline.counters.traffic().bytes_read == 0


def test_states_never_written_are_zero_and_not_read(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.extend(SIZES, [FP32] * len(SIZES))
    Problem(SIZES).step(store)
    store.pipeline.wait_idle()
    assert store.pipeline.counters.traffic().bytes_read == 0
    assert store.pipeline.counters.traffic().bytes_written == store.memory().file_bytes


def test_each_step_moves_each_byte_once_each_way(tmp_path: Path) -> None:
    store = store_at(tmp_path, budget=120_000)
    store.extend(SIZES, [FP32] * len(SIZES))
    problem = Problem(SIZES)
    for _ in range(4):
        problem.step(store)
        store.pipeline.prefetch()
    problem.step(store)
    store.pipeline.wait_idle()
    file_bytes, ring_bytes = store.memory().file_bytes, store.memory().ring_bytes
    traffic = store.pipeline.counters.traffic()
    assert traffic.bytes_read + traffic.bytes_spared == 4 * file_bytes
    assert traffic.bytes_written == 5 * file_bytes
    assert traffic.ring_high_water_bytes == ring_bytes
    # Each step but the first begins with the chunks that the last one left in the ring.
    assert 0 < traffic.bytes_spared <= 4 * ring_bytes


def test_chunks_without_a_gradient_do_not_move(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.extend([4096, 4096], [FP32] * 2)
    problem = Problem([4096, 4096])
    problem.step(store, without=(1,))
    store.pipeline.prefetch()
    problem.step(store, without=(0,))
    store.pipeline.wait_idle()
    assert store.pipeline.counters.traffic().bytes_written == store.memory().file_bytes
    assert store.read([0])[0]["exp_avg"].count_nonzero() == 4096


def test_extending_keeps_what_is_there(tmp_path: Path) -> None:
    store = store_at(tmp_path, 0.5)
    store.extend([5000], [FP32])
    problem = Problem([5000])
    problem.step(store)
    before = store.read([0])[0]
    numbers = store.extend([300, 7000], [BF16, FP32])
    assert list(numbers) == [1, 2]
    after = store.read([0])[0]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert store.pipeline.counters.traffic().chunks_updated > 0
    assert store.memory().logical_bytes == 8 * 12_000 + 12 * 300


def test_ring_serves_the_widest_family(tmp_path: Path) -> None:
    store = store_at(tmp_path, budget=None)
    store.extend([5000], [FP32])
    narrow = store.memory().ring_bytes
    store.extend([500_000], [BF16])
    assert narrow < store.memory().ring_bytes <= 48 << 20


def test_striped_chunks_go_round_the_directories(tmp_path: Path) -> None:
    places = tuple(tmp_path / name for name in "abc")
    for place in places:
        place.mkdir()
    store = StateStore(Placement(1.0, places, None), SMALL)
    store.extend([50_000], [FP32])
    assert store.storage.directories == places
    problem = Problem([50_000])
    problem.step(store)
    problem.step(store)
    alone = store_at(tmp_path)
    alone.extend([50_000], [FP32])
    other = Problem([50_000])
    other.step(alone)
    other.step(alone)
    assert torch.equal(problem.weights[0], other.weights[0])


def test_nothing_has_a_name_in_the_directory(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.extend(SIZES, [FP32] * len(SIZES))
    assert list(tmp_path.iterdir()) == []


def test_no_directory_named_picks_a_real_disk_and_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "tensorstow"):
        store = StateStore(Placement(1.0, (), None), SMALL)
        store.extend([5000], [FP32])
    (chosen,) = store.storage.directories
    assert str(chosen) in caplog.text
    assert not str(chosen).startswith("/dev/shm")


def test_a_directory_in_ram_is_refused() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    with pytest.raises(DirectoryError, match="stays in RAM"):
        StateStore(Placement(1.0, (Path("/dev/shm"),), None), SMALL)


def test_too_little_budget_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    store = store_at(tmp_path, budget=1000)
    with pytest.raises(BudgetError):
        store.extend([5000], [FP32])
    assert store.storage.directories == ()


def test_a_full_disk_leaves_the_budget_to_what_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, fresh = (store_at(tmp_path, budget=6 << 20) for _ in range(2))

    def full(_: object) -> list[object]:
        raise DirectoryError(errno.ENOSPC, "full")

    with monkeypatch.context() as patches:
        patches.setattr(store.storage, "reserve", full)
        with pytest.raises(DirectoryError, match="full"):
            store.extend([1_000_000], [FP32])
    for extended in (store, fresh):
        extended.extend([1_000_000], [FP32])
    assert store.memory() == fresh.memory()
    assert any(chunk.resident for chunk in fresh.chunks)


def test_a_failed_write_poisons_and_names_the_place(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.extend([50_000], [FP32])
    problem = Problem([50_000])
    assert store.engine is not None
    store.engine.inject_fault("write", after=3, error=errno.ENOSPC)

    def step_and_wait() -> None:
        problem.step(store)
        store.pipeline.wait_idle()

    with pytest.raises(TransferError) as caught:
        step_and_wait()
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.operation == "write"
    assert caught.value.path.startswith(str(tmp_path))
    with pytest.raises(PoisonedError, match="half updated"):
        problem.step(store)
    with pytest.raises(PoisonedError):
        store.read([0])
    store.close()


def test_a_forked_child_is_told(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.extend([5000], [FP32])
    child = os.fork()
    if child == 0:
        try:
            store.pipeline.wait_idle()
        except ForkError:
            os._exit(42)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    Problem([5000]).step(store)


@pytest.mark.usefixtures("garbage_apart")
def test_dropping_the_store_closes_its_files(tmp_path: Path) -> None:
    before = open_descriptors()
    store = store_at(tmp_path)
    store.extend([5000], [FP32])
    assert open_descriptors() > before
    del store
    gc.collect()
    assert open_descriptors() == before


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = store_at(tmp_path)
    store.extend([5000], [FP32])
    store.close()
    store.close()
    with pytest.raises(PoisonedError, match="closed"):
        Problem([5000]).step(store)


@pytest.mark.parametrize("fraction", [0.0, 0.6, 1.0])
def test_parameters_that_are_to_be_apart_share_no_chunk(tmp_path: Path, fraction: float) -> None:
    chunk_groups = ["a", "b", "a", "a", "b"]
    store = store_at(tmp_path, fraction)
    store.extend(SIZES, [FP32] * len(SIZES), chunk_groups=chunk_groups)
    units = [{chunk_groups[n] for n in chunk.owners} for chunk in store.chunks]
    assert all(len(unit) == 1 for unit in units)
    names = [unit.pop() for unit in units]
    assert names == sorted(names)
    assert {n for chunk in store.chunks for n in chunk.owners} == {0, 1, 2, 4}
    ours, together = Problem(SIZES), Problem(SIZES)
    plain = store_at(tmp_path, fraction)
    plain.extend(SIZES, [FP32] * len(SIZES))
    for problem, at in ((ours, store), (together, plain)):
        problem.step(at)
        problem.step(at)
    pairs = zip(ours.weights, together.weights, strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    numbers = range(len(SIZES))
    assert torch.equal(store.read(numbers)[2]["exp_avg"], plain.read(numbers)[2]["exp_avg"])
