"""Host memory is a formula: the ring's high water, the process's RSS, and no page cache."""

import ctypes
import gc
import mmap
import os
import tracemalloc
from pathlib import Path

import pytest
import torch

import children
from parity.scratch import scratch_files
from tensorstow import AdamW, PipelinePolicy
from tensorstow.optim.options import Durability
from tensorstow.states import layout
from tensorstow.states.layout import DEFAULT_RING_BYTES, Family, slot_bytes
from tensorstow.states.memory import predict_memory

CHUNK = 4096
SMALL = PipelinePolicy(chunk_elements=CHUNK)
SLOT = slot_bytes(Family(torch.float32, amsgrad=False), CHUNK, with_weights=False)
FP32 = Family(torch.float32, amsgrad=False)
STATES = FP32.state_bytes(CHUNK)
MIB = 1 << 20


def trained(
    directory: Path, elements: int, *, budget: int | None = None, steps: int = 3
) -> tuple[AdamW, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.ones(elements))
    optimizer = AdamW(
        [parameter],
        states="disk",
        dir=directory,
        durability="none",
        ram_budget=budget,
        policy=SMALL,
    )
    train(optimizer, parameter, steps)
    return optimizer, parameter


def train(optimizer: AdamW, parameter: torch.nn.Parameter, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward((parameter * 2).sum())
        optimizer.step()
    optimizer.synchronize()


@pytest.mark.parametrize("slots", [2, 7])
def test_high_water_is_the_formula_and_the_same_for_ten_times_the_model(
    tmp_path: Path, slots: int
) -> None:
    high_water = []
    for elements in (20 * CHUNK, 200 * CHUNK):
        optimizer, _ = trained(tmp_path, elements, budget=slots * SLOT + SLOT // 2)
        predicted = predict_memory(
            [(FP32, [elements])],
            chunk_elements=CHUNK,
            budget=slots * SLOT + SLOT // 2,
        )
        assert optimizer._memory() == predicted
        assert optimizer._traffic().ring_high_water_bytes == predicted.ring_bytes
        high_water.append(optimizer._traffic().ring_high_water_bytes)
        optimizer.close()
    assert high_water == [slots * SLOT] * 2


@pytest.mark.parametrize("elements", [124_000_000, 1_240_000_000])
def test_the_default_ring_does_not_grow_with_the_model(elements: int) -> None:
    chunk = PipelinePolicy().chunk
    memory = predict_memory([(FP32, [elements])], chunk_elements=chunk)
    slot = slot_bytes(FP32, chunk, with_weights=False)
    assert memory.ring_bytes == DEFAULT_RING_BYTES // slot * slot <= 48 * MIB
    assert memory.host_bytes == memory.ring_bytes


@pytest.mark.parametrize(
    ("budget", "slots", "resident"),
    [
        (2 * SLOT, 2, 0),
        (2 * SLOT + STATES - 1, 2, 0),
        (3 * SLOT - 1, 2, 1),
        (9 * SLOT, 9, 0),
        (9 * SLOT + STATES - 1, 9, 0),
        (9 * SLOT + STATES, 9, 1),
        (9 * SLOT + 10 * STATES, 9, 10),
        (9 * SLOT + 14 * STATES, 6, 14),
        (9 * SLOT + 20 * STATES - 1, 1, 19),
        (9 * SLOT + 20 * STATES, 0, 20),
        (100 * SLOT, 0, 20),
    ],
)
def test_budget_buys_slots_then_states_that_stay_and_no_more_than_a_model_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int, slots: int, resident: int
) -> None:
    monkeypatch.setattr(layout, "DEFAULT_RING_BYTES", 9 * SLOT)
    optimizer, parameter = trained(tmp_path, 20 * CHUNK, budget=budget)
    memory, traffic = optimizer._memory(), optimizer._traffic()
    assert memory.ring_bytes == traffic.ring_high_water_bytes == slots * SLOT
    assert memory.ram_bytes == resident * STATES
    assert memory.disk_bytes == memory.file_bytes == (20 - resident) * STATES
    assert memory.host_bytes <= budget
    assert memory == predict_memory([(FP32, [20 * CHUNK])], chunk_elements=CHUNK, budget=budget)
    # What stays does not move: three steps, the first with nothing to read.
    assert traffic.bytes_written == 3 * memory.file_bytes
    assert traffic.bytes_read + traffic.bytes_spared == 2 * memory.file_bytes
    in_ram = torch.nn.Parameter(torch.ones(20 * CHUNK))
    train(AdamW([in_ram]), in_ram, 3)
    assert torch.equal(parameter, in_ram)
    optimizer.close()


# --- the process ---

CHILD = """
import sys
import torch
from tensorstow import AdamW
torch.set_num_threads(2)
p = torch.nn.Parameter(torch.ones(int(sys.argv[1])))
fraction = float(sys.argv[2])
where = {"dir": sys.argv[3], "durability": "none"} if fraction else {}
optimizer = AdamW([p], states=fraction, **where)
p.grad = torch.ones_like(p)
for _ in range(3):
    optimizer.step()
optimizer.synchronize()
with open("/proc/self/smaps_rollup") as lines:
    rss = next(int(line.split()[1]) for line in lines if line.startswith("Rss:"))
print(rss * 1024, optimizer._memory().host_bytes)
"""


def rss_and_prediction(elements: int, fraction: float, directory: Path) -> tuple[int, int]:
    out = children.run("-c", CHILD, str(elements), str(fraction), directory)
    rss, predicted = map(int, out.stdout.split())
    return rss, predicted


def test_rss_falls_by_what_was_predicted(tmp_path: Path) -> None:
    elements = 30_000_000
    rss, predicted = {}, {}
    for fraction in (0.0, 0.5, 1.0):
        rss[fraction], predicted[fraction] = rss_and_prediction(elements, fraction, tmp_path)
    assert predicted[0.0] == 8 * elements
    assert predicted[1.0] <= 48 * MIB
    for fraction in (0.5, 1.0):
        saving = predicted[0.0] - predicted[fraction]
        assert 0.88 * saving <= rss[0.0] - rss[fraction] <= 1.12 * saving


# --- the page cache ---


def page_cache_bytes(path: Path) -> int:
    """Return how much of a file the page cache holds; looking does not bring any in."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDWR)  # mincore(2) tells only who may write
    try:
        with mmap.mmap(fd, size) as view:
            pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            hold = (ctypes.c_char * size).from_buffer(view)
            libc = ctypes.CDLL(None, use_errno=True)
            code = libc.mincore(ctypes.c_void_p(ctypes.addressof(hold)), size, pages)
            del hold
            gc.collect()
    finally:
        os.close(fd)
    assert code == 0, os.strerror(ctypes.get_errno())
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_states_on_disk_are_not_in_the_page_cache(tmp_path: Path) -> None:
    optimizer, _ = trained(tmp_path, 1_000_000)
    files = scratch_files(tmp_path)
    sizes = sum(path.stat().st_size for path in files)
    assert sizes == optimizer._memory().file_bytes >= 8_000_000
    assert sum(page_cache_bytes(path) for path in files) < MIB
    # The probe does see pages of such a file once somebody reads it through the cache.
    for path in files:
        path.read_bytes()
    assert sum(page_cache_bytes(path) for path in files) >= 0.9 * sizes


def test_the_probe_sees_a_buffered_file(tmp_path: Path) -> None:
    path = tmp_path / "buffered"
    path.write_bytes(bytes(8 * MIB))
    assert page_cache_bytes(path) == 8 * MIB


# --- the steady state ---


class Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """Return what the C library's main arena and its mappings have given out."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("this C library has no mallinfo2")
    libc.mallinfo2.restype = Mallinfo2
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def rss_bytes() -> int:
    """Return the RSS without freed memory that the C library keeps: how much that is varies."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


@pytest.mark.usefixtures("garbage_apart")
def test_the_steady_state_allocates_nothing(tmp_path: Path) -> None:
    optimizer, parameter = trained(tmp_path, 50 * CHUNK, budget=8 * SLOT, steps=30)
    high_water = optimizer._traffic().ring_high_water_bytes
    native, rss = [], []
    # A leak is in each of them. Threads of libraries take pages once, whenever they first run.
    for _ in range(3):
        gc.collect()
        before = (allocated_bytes(), rss_bytes())
        train(optimizer, parameter, 200)
        gc.collect()
        native.append(allocated_bytes() - before[0])
        rss.append(rss_bytes() - before[1])
    assert optimizer._traffic().ring_high_water_bytes == high_water == 8 * SLOT
    # 10,000 chunks went through: this is two bytes for each. A slot leaked per step is 11 MiB.
    assert min(native) < 20_000, native
    assert min(rss) < MIB, rss


def test_the_steady_state_keeps_no_python_objects(tmp_path: Path) -> None:
    optimizer, parameter = trained(tmp_path, 50 * CHUNK, budget=8 * SLOT, steps=10)
    tracemalloc.start()
    try:
        train(optimizer, parameter, 2)
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        train(optimizer, parameter, 50)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 50 * 100  # less than the smallest tensor per step


@pytest.mark.parametrize("durability", ["none", "commit"])
def test_a_budget_is_spent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: Durability
) -> None:
    """Parameters that come later do not get what the first ones have bought already."""
    monkeypatch.setattr(layout, "DEFAULT_RING_BYTES", 2 * SLOT)
    slot = slot_bytes(FP32, CHUNK, with_weights=durability == "commit")
    budget = max(2 * SLOT, 2 * slot) + 3 * STATES
    parameters = [torch.nn.Parameter(torch.ones(20 * CHUNK)) for _ in range(2)]
    optimizer = AdamW(
        parameters[:1], states="disk", dir=tmp_path, ram_budget=budget, policy=SMALL,
        durability=durability,
    )  # fmt: skip
    first = optimizer._memory()
    assert first.ram_bytes == 3 * STATES
    optimizer.add_param_group({"params": parameters[1:]})
    both = optimizer._memory()
    assert both.logical_bytes == 2 * first.logical_bytes
    assert both.ram_bytes == 3 * STATES
    assert both.host_bytes <= budget
    optimizer.close()


def test_a_budget_buys_what_is_not_at_home_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = slot_bytes(FP32, CHUNK, with_weights=True)
    monkeypatch.setattr(layout, "DEFAULT_RING_BYTES", 2 * slot)
    optimizer = AdamW(
        [torch.nn.Parameter(torch.ones(20 * CHUNK))], states=0.5, dir=tmp_path, policy=SMALL,
        ram_budget=2 * slot + 3 * STATES,
    )  # fmt: skip
    assert optimizer._memory().ram_bytes == 13 * STATES
    optimizer.close()
