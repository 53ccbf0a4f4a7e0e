import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorstow.base.errors import BudgetError, DTypeError, OptionError
from tensorstow.states.layout import (
    DEFAULT_RING_BYTES,
    LANE,
    ElementRange,
    Family,
    cut,
    lay_out,
    parts_of,
    plan_ring,
    slot_bytes,
    space_elements,
    split,
)
from tensorstow.states.memory import predict_memory

SIZES = st.lists(st.integers(0, 5000), max_size=30)
CAPACITY = st.integers(1, 200).map(lambda n: n * LANE)
FP32 = Family(torch.float32, amsgrad=False)
SLOT = slot_bytes(FP32, 1 << 19, with_weights=False)
BLOCK = 4096


@given(sizes=SIZES, fraction=st.floats(0, 1))
def test_split_covers_every_element_once_and_is_exact(sizes: list[int], fraction: float) -> None:
    ram, disk = split(sizes, fraction)
    assert sum(s.stop - s.start for s in disk) == round(fraction * sum(sizes))
    seen = [range(s.start, s.stop) for s in (*ram, *disk)]
    for parameter, size in enumerate(sizes):
        mine = [r for s, r in zip((*ram, *disk), seen, strict=True) if s.parameter == parameter]
        assert sorted(itertools.chain(*mine)) == list(range(size))
    assert len({s.parameter for s in ram} & {s.parameter for s in disk}) <= 1


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan")])
def test_split_refuses_what_is_no_fraction(fraction: float) -> None:
    with pytest.raises(OptionError, match="between 0"):
        split([1], fraction)


@given(sizes=SIZES)
def test_runs_begin_at_lanes_and_never_overlap(sizes: list[int]) -> None:
    runs = lay_out([ElementRange(i, 0, n) for i, n in enumerate(sizes)])
    end = 0
    for run in runs:
        assert run.position % LANE == 0
        assert run.position >= end
        end = run.position + run.count
    padding = space_elements(runs) - sum(sizes)
    assert 0 <= padding < LANE * (len(sizes) + 1)


@given(sizes=SIZES, capacity=CAPACITY)
def test_cutting_a_space_loses_and_repeats_nothing(sizes: list[int], capacity: int) -> None:
    runs = lay_out([ElementRange(i, 0, n) for i, n in enumerate(sizes)])
    chunks = list(cut(runs, capacity))
    covered: dict[int, list[int]] = {i: [] for i, n in enumerate(sizes)}
    for index, chunk in enumerate(chunks):
        assert 0 < chunk.elements <= capacity
        for run in chunk.runs:
            assert run.position + run.count <= chunk.elements
            covered[run.parameter] += range(run.start, run.start + run.count)
            # The same place as in the space: a view over several chunks is contiguous.
            whole = next(r for r in runs if r.parameter == run.parameter and r.count)
            assert index * capacity + run.position == whole.position + run.start
    for parameter, size in enumerate(sizes):
        assert covered[parameter] == list(range(size))


def test_cut_refuses_a_capacity_that_splits_a_lane() -> None:
    with pytest.raises(OptionError, match="multiple of 32"):
        list(cut(lay_out([ElementRange(0, 0, 5)]), 24))


@given(elements=st.integers(1, 1 << 20))
def test_a_stream_is_a_whole_number_of_blocks(elements: int) -> None:
    for part in parts_of(FP32, elements):
        assert part.file_at % BLOCK == part.slot_at % BLOCK == part.nbytes % BLOCK == 0
        assert 0 <= part.nbytes - 4 * elements < BLOCK


def test_streams_of_a_slot_never_sit_a_power_of_two_apart() -> None:
    for power in range(12, 24):
        first, second, _ = parts_of(FP32, 1 << power)
        apart = second.slot_at - first.slot_at
        assert apart & (apart - 1)


def test_the_default_ring_holds_for_every_family() -> None:
    for family in (FP32, Family(torch.bfloat16, amsgrad=True)):
        slot = slot_bytes(family, 1 << 19, with_weights=True)
        ring = plan_ring(slot, 10_000, budget=None)
        assert ring.slots >= 5
        assert ring.nbytes <= DEFAULT_RING_BYTES


def test_a_budget_below_two_chunks_is_refused_with_both_sizes() -> None:
    with pytest.raises(BudgetError, match=r"1\.0 MiB.*at least 2 chunks.*8\.0 MiB"):
        plan_ring(SLOT, 10, budget=1 << 20)


def test_a_budget_buys_slots_up_to_the_default_ring() -> None:
    assert [plan_ring(SLOT, 40, budget=n << 20).slots for n in (16, 48, 512)] == [3, 11, 11]


def test_the_formula_of_the_seed_model() -> None:
    """GPT-2: 8 bytes a parameter leave RAM, and the ring does not grow with the model."""
    sizes = [50257 * 768, 1024 * 768, *([768, 768, 768 * 2304, 2304, 768 * 3072, 3072] * 12)]
    halves = {
        f: predict_memory([(FP32, sizes)], disk_fraction=f, chunk_elements=1 << 19)
        for f in (0.0, 0.5, 1.0)
    }
    for fraction, memory in halves.items():
        assert memory.disk_bytes == 8 * round(fraction * sum(sizes))
        assert memory.ram_bytes + memory.disk_bytes == memory.logical_bytes == 8 * sum(sizes)
    ten_times = predict_memory([(FP32, sizes * 10)], chunk_elements=1 << 19)
    assert halves[1.0].ring_bytes == ten_times.ring_bytes <= 48 << 20
    assert halves[0.0].ring_bytes == 0
    assert halves[1.0].host_bytes == halves[1.0].ring_bytes


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int32])
def test_a_family_refuses_dtypes_that_no_kernel_takes(dtype: torch.dtype) -> None:
    with pytest.raises(DTypeError, match="float32, bfloat16 and float16"):
        Family(dtype, amsgrad=False)


def test_streams_by_family() -> None:
    assert FP32.states == ("exp_avg", "exp_avg_sq")
    assert Family(torch.float16, amsgrad=True).states == (
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "master",
    )
