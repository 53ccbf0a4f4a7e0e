"""Freed blocks of torch's are kept, and their pages become those of the next ones."""

import gc
import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from shutil import which
from typing import Any

import pytest
import torch
from torch import nn

import children
from tensorstow import AdamW, Plan, _native, stow
from tensorstow.activations.host_blocks import HostBlocks
from tensorstow.base.errors import OptionError
from tensorstow.io.allocator import cache_large_blocks, empty_cache, is_large, set_memory_limit
from tensorstow.io.device_link import open_link

stow_module = importlib.import_module("tensorstow.fsdp.stow")
_CODE = """
import resource
import torch
from tensorstow import _native
from tensorstow.io.allocator import cache_large_blocks

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

{call}
start = resident()
for step in range(6):
    if step == 2:
        before = faults()
    blocks = [torch.ones(6 << 20, dtype=torch.uint8) for _ in range(20)]
    del blocks[:-1]  # the last one is above all others in a heap
    large = [torch.ones(19 << 20, dtype=torch.uint8) for _ in range(6)]
    del blocks, large
print(resident() - start, faults() - before)
"""
_IN_USE = 120 << 20
_IS_KEPT = "assert not cache_large_blocks(); assert _native.allocator_bytes() == (0, 0, 0)"


def _printed(code: str) -> str:
    """Return what a program prints, which must not fail: its memory grows from where it begins."""
    return children.run("-c", code).stdout


def _printed_alone(code: str, **environment: str) -> str:
    """Return what an interpreter prints: its own memory counts, or how malloc begins."""
    program = [sys.executable, "-c", code]
    environ = os.environ | environment
    return subprocess.run(
        program, stdout=subprocess.PIPE, text=True, check=True, env=environ
    ).stdout


def _measured(call: str, **environment: str) -> tuple[int, int]:
    """Return what is resident more in the end, and the page faults of four rounds."""
    held, faults = _printed_alone(_CODE.format(call=call), **environment).split()
    return int(held), int(faults)


def test_no_page_is_new_in_later_rounds_and_no_more_is_held_than_was_in_use() -> None:
    held, faults = _measured("assert cache_large_blocks()")
    assert held < 1.1 * _IN_USE
    assert faults < 500
    given_back = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    assert _measured("", **given_back)[1] > 50_000  # else there would be nothing to mend


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "33554432"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=33554432"),
    ],
)
def test_a_threshold_of_the_user_s_is_kept(name: str, value: str) -> None:
    _measured(_IS_KEPT, **{name: value})


def test_an_allocator_that_is_preloaded_is_kept(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(
        """
        #include <stddef.h>
        void *aligned_alloc(size_t, size_t);
        int posix_memalign(void **block, size_t alignment, size_t bytes) {
            *block = aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
            return *block == NULL;
        }
        """,
        encoding="utf-8",
    )
    subprocess.run([which("cc") or "cc", "-shared", "-fPIC", "-o", library, source], check=True)
    _measured(_IS_KEPT, LD_PRELOAD=str(library))


def test_smaller_blocks_do_not_go_back_and_come_again() -> None:
    code = """
import resource
import torch
from tensorstow.io.allocator import cache_large_blocks

assert cache_large_blocks()
for step in range(12):
    if step == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(6)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    assert int(_printed(code)) < 5000  # of 15,360 pages


def test_small_blocks_get_the_addresses_that_are_cached() -> None:
    code = """
import resource
import torch
from tensorstow.io.allocator import cache_large_blocks

assert cache_large_blocks()
with open("/proc/self/statm") as f:
    now = int(f.read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (now + (300 << 20), -1))
torch.empty(250 << 20, dtype=torch.uint8)
kept = [torch.empty(1 << 20, dtype=torch.uint8) for _ in range(200)]
kept.append(torch.empty(3 << 20, dtype=torch.uint8))
"""
    _printed(code)


def test_functions_that_another_tool_has_put_in_stay() -> None:
    code = """
import ctypes
import importlib
import subprocess
import sys
from pathlib import Path
import torch
from tensorstow import _native
from tensorstow.io.allocator import cache_large_blocks

library = Path(torch.__file__).parent / "lib/libc10.so"
(slot,) = [
    int(line.split()[0], 16)
    for line in subprocess.run(
        ["readelf", "-rW", library], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    if "JUMP_SLO" in line and "posix_memalign" in line
]
with open("/proc/self/maps") as f:
    base = min(int(line.split("-")[0], 16) for line in f if line.rstrip().endswith(str(library)))
other = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t)(
    ctypes.CDLL(None).posix_memalign
)
place = ctypes.cast(base + slot, ctypes.POINTER(ctypes.c_void_p))
place[0] = ctypes.cast(other, ctypes.c_void_p).value
assert not cache_large_blocks()
assert _native.allocator_bytes() == (0, 0, 0)
"""
    if which("readelf") is None:
        pytest.skip("binutils are not installed")
    _printed(code)


@pytest.mark.parametrize(
    "call",
    [
        "stow(nn.Linear(8, 8), AdamW, lr=1e-3, plan=Plan())",
        "stow(nn.Linear(8, 8), None)",
        "AdamW(nn.Linear(8, 8).parameters(), lr=1e-3)",
        "StowedOptimizer(torch.optim.SGD, nn.Linear(8, 8).parameters(), lr=1e-3)",
        "calibrate([])",
    ],
)
def test_what_installs_it(call: str) -> None:
    code = f"""
import torch
from torch import nn
from tensorstow import AdamW, Plan, StowedOptimizer, _native, stow
from tensorstow.measure.calibration import calibrate

torch.ones(4 << 20)
assert _native.allocator_bytes() == (0, 0, 0)
kept = {call}
torch.ones(4 << 20)
assert _native.allocator_bytes()[1] >= 16 << 20
"""
    _printed(code)


def test_stow_returns_what_was_kept_before_it_measures_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert cache_large_blocks()
    torch.ones(16 << 20)
    assert _native.allocator_bytes()[1] >= 64 << 20
    seen: list[int] = []
    choose = stow_module.choose_plan

    def choosing(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401  # as it has them
        seen.append(_native.allocator_bytes()[1])
        return choose(*arguments, **keywords)

    monkeypatch.setattr(stow_module, "choose_plan", choosing)
    _, optimizer = stow(nn.Linear(1024, 1024), partial(AdamW, lr=1e-3), plan="auto")
    assert seen == [0]
    optimizer.close()


def test_stow_returns_what_placing_took(tmp_path: Path) -> None:
    assert cache_large_blocks()
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    make = partial(AdamW, lr=1e-3, dir=tmp_path, durability="none")
    _, optimizer = stow(model, make, plan=Plan(parameters="disk", states="disk"))
    assert _native.allocator_bytes()[1] == 0  # where the weights were that are on disk now
    optimizer.close()


def test_close_returns_what_is_kept() -> None:
    assert cache_large_blocks()
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024))
    model, optimizer = stow(model, partial(AdamW, lr=1e-3), plan=Plan())
    model(torch.ones(2, 1024)).sum().backward()
    optimizer.step()
    used, _, _ = _native.allocator_bytes()
    optimizer.zero_grad()
    now, cached, _ = _native.allocator_bytes()
    assert used - now == 2 * (4 << 20)  # gradients
    assert cached >= 2 * (4 << 20)
    optimizer.close()
    assert _native.allocator_bytes()[1] == 0


def fill_cache(count: int) -> None:
    """Keep freed blocks of so many times 8 MiB, and no others."""
    gc.collect()  # what other tests have left is freed now, and not later
    assert cache_large_blocks()
    empty_cache()
    tensors = [torch.ones(8 << 20, dtype=torch.uint8) for _ in range(count)]
    del tensors
    assert _native.allocator_bytes()[1] == count * (8 << 20)


def test_part_of_what_is_kept_goes_back() -> None:
    fill_cache(3)
    empty_cache((5 << 20) + 1)  # whole huge pages
    assert _native.allocator_bytes()[1] == (24 - 6) << 20
    empty_cache(64 << 20)
    assert _native.allocator_bytes()[1] == 0


def test_memory_that_activations_are_read_into_takes_the_place_of_what_is_kept() -> None:
    fill_cache(3)
    cpu = torch.device("cpu")
    block = HostBlocks(1 << 30).take(8 << 20, cpu, open_link(cpu))
    assert _native.allocator_bytes()[1] == (24 - 8) << 20
    del block


def test_tensors_of_a_forked_child_are_its_own() -> None:
    assert cache_large_blocks()
    kept = torch.arange(1 << 20)
    torch.ones(4 << 20)
    child = os.fork()
    if child == 0:
        if _native.allocator_bytes()[1] != 0:  # the parent uses those pages again
            os._exit(2)
        torch.set_num_threads(1)  # the others are not there
        mine = [torch.full((1 << 20,), float(k)) for k in range(8)]
        os._exit(0 if all(bool((t == k).all()) for k, t in enumerate(mine)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(kept, torch.arange(1 << 20))
    empty_cache()


_LIMITED = """
import torch
import tensorstow
from tensorstow import _native
from tensorstow.base.errors import BudgetError
from tensorstow.io.arena import Arena

MIB = 1 << 20

def ones(mib, of=1 << 20):
    return [torch.ones(of, dtype=torch.uint8) for _ in range((mib * MIB) // of)]

def refused(call):
    try:
        call()
    except (RuntimeError, BudgetError) as error:
        assert _native.resident_bytes() <= limit, _native.resident_bytes() - limit
        return str(error)
    raise AssertionError("it had memory")

ones(1), Arena(4096, in_children=True)  # what is loaded late
limit = _native.resident_bytes() + 100 * MIB
tensorstow.set_memory_limit(limit)
"""


@pytest.mark.parametrize("of", [100 << 10, 1 << 20, 20 << 20])
def test_a_tensor_beyond_the_limit_of_memory_raises_and_one_within_does_not(of: int) -> None:
    code = f"""
kept = ones(80, {of})
assert "can't allocate memory" in refused(lambda: ones(40, {of}))
del kept
kept = ones(80, {of})  # what was freed is there again
del kept
tensorstow.set_memory_limit(None)
kept = ones(200, {of})
"""
    _printed(_LIMITED + code)


def test_below_a_limit_small_tensors_and_large_ones_take_each_other_s_place() -> None:
    code = """
for _ in range(3):
    kept = ones(80, 1 << 20)
    del kept
    kept = ones(80, 20 << 20)
    del kept
"""
    _printed(_LIMITED + code)


def test_buffers_count_in_the_limit_before_they_are_used() -> None:
    code = """
arena = Arena(60 * MIB, in_children=False)
message = refused(lambda: Arena(60 * MIB, in_children=False))
assert message.startswith("60.0 MiB of host memory were requested, and the process has "), message
assert message.endswith(
    " that tensorstow.set_memory_limit allows. Lower the budget, or raise the limit."
)
assert "can't allocate memory" in refused(lambda: ones(60, 20 << 20))
"""
    _printed(_LIMITED + code)


@pytest.mark.parametrize("of", [1 << 20, 30 << 20])
def test_tensors_count_before_they_are_filled(of: int) -> None:
    code = f"""
kept = []
message = refused(
    lambda: kept.extend(torch.empty({of}, dtype=torch.uint8) for _ in range((200 * MIB) // {of}))
)
assert "can't allocate memory" in message
kept.clear()
kept = [torch.empty({of}, dtype=torch.uint8) for _ in range((80 * MIB) // {of})]
for tensor in kept:
    tensor.fill_(1)
assert _native.resident_bytes() <= limit
"""
    _printed(_LIMITED + code)


def test_threads_do_not_pass_the_limit_together() -> None:
    code = """
import threading

kept, errors = [], []
ready = threading.Barrier(4)

def take():
    ready.wait()
    try:
        kept.append(torch.ones(40 * MIB, dtype=torch.uint8))
    except RuntimeError as error:
        errors.append(error)

threads = [threading.Thread(target=take) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert (len(kept), len(errors)) == (2, 2), (kept, errors)
assert _native.resident_bytes() <= limit
"""
    _printed(_LIMITED + code)


def test_files_that_are_mapped_later_are_not_the_process_s_own(tmp_path: Path) -> None:
    file = tmp_path / "values"
    file.write_bytes(bytes(200 << 20))
    code = f"""
mapped = torch.from_file({str(file)!r}, size=200 * MIB, dtype=torch.uint8, shared=True)
assert int(mapped[::4096].sum()) == 0
kept = ones(80, 20 << 20)
assert "can't allocate memory" in refused(lambda: ones(40, 20 << 20))
"""
    _printed(_LIMITED + code)


def test_units_on_disk_share_the_memory_below_a_limit(tmp_path: Path) -> None:
    code = f"""
from torch import nn
from tensorstow import AdamW, Plan, stow

tensorstow.set_memory_limit(None)
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(24)))
for unit in model[:-1]:
    unit.requires_grad_(False)
weights = {{name: torch.zeros(p.shape) for name, p in model.named_parameters()}}
from safetensors.torch import save_file
save_file(weights, {str(tmp_path / "base.safetensors")!r})
del weights
plan = Plan(parameters="disk", states="disk", overlap="none")
make = lambda: stow(
    model, AdamW, lr=1e-3, dir={str(tmp_path)!r}, durability="none", plan=plan,
    weights={str(tmp_path / "base.safetensors")!r},
)
_native.empty_cache()
before = _native.resident_bytes()
limit = before + 250 * MIB  # of 384 MiB of weights
tensorstow.set_memory_limit(limit)
model, optimizer = make()
for _ in range(2):
    model(torch.ones(2, 2048)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert _native.resident_bytes() <= limit
optimizer.close()
"""
    _printed(_LIMITED + code)


_POOLED = """
from pathlib import Path
from tensorstow.memory.buffer_pool import BufferPool

UNIT = 20 * MIB
tensorstow.set_memory_limit(None)
pool = BufferPool([Path({directory!r})], 10 * UNIT, 10 * UNIT, UNIT)
buffers = [pool.add(UNIT) for _ in range(10)]

def fill(buffer, value):
    buffer.pin(for_write=True)
    buffer.bytes.fill_(value)
    buffer.unpin(dirty=True)

def value(buffer):
    buffer.pin()
    found = set(buffer.bytes[:: 1 << 16].tolist())
    buffer.unpin()
    return found

limit = _native.resident_bytes() + 100 * MIB
tensorstow.set_memory_limit(limit)
"""


def test_buffers_leave_for_others_below_a_limit(tmp_path: Path) -> None:
    code = """
for number, buffer in enumerate(buffers):
    fill(buffer, number)
    assert _native.resident_bytes() <= limit
assert 2 * UNIT <= pool.memory.held < 6 * UNIT
for number, buffer in enumerate(buffers):
    assert value(buffer) == {number}
    assert _native.resident_bytes() <= limit
"""
    _printed(_LIMITED + _POOLED.format(directory=str(tmp_path)) + code)


def test_buffers_that_cannot_leave_make_the_next_pin_raise(tmp_path: Path) -> None:
    code = """
kept = []

def pin_all():
    for number, buffer in enumerate(buffers):
        buffer.pin(for_write=True)
        kept.append(buffer)
        buffer.bytes.fill_(number)

assert "tensorstow.set_memory_limit allows" in refused(pin_all)
assert 3 <= len(kept) < 6
for buffer in kept:
    buffer.unpin(dirty=True)
fill(buffers[-1], 9)  # the pool goes on
assert value(buffers[-1]) == {9}
assert [value(buffer) for buffer in kept] == [{number} for number in range(len(kept))]
"""
    _printed(_LIMITED + _POOLED.format(directory=str(tmp_path)) + code)


def test_nothing_is_read_ahead_that_the_limit_has_no_room_for(tmp_path: Path) -> None:
    code = """
tensorstow.set_memory_limit(None)
for number, buffer in enumerate(buffers):
    fill(buffer, number)
pool.synchronize()
pool.resize(0)
pool.resize(10 * UNIT)
limit = _native.resident_bytes() + 50 * MIB
tensorstow.set_memory_limit(limit)
held = pool.memory.held
pool.expect(buffers)
pool.synchronize()
assert held + 1 * UNIT <= pool.memory.held <= held + 3 * UNIT, (held, pool.memory.held)
assert _native.resident_bytes() <= limit
assert [value(buffer) for buffer in buffers] == [{number} for number in range(10)]
assert _native.resident_bytes() <= limit
"""
    _printed(_LIMITED + _POOLED.format(directory=str(tmp_path)) + code)


def test_a_plan_that_is_chosen_stays_below_the_limit() -> None:
    code = """
from torch import nn
from tensorstow import AdamW, stow
from tensorstow.fsdp.automatic import own_host_bytes

assert own_host_bytes(1) <= 100 * MIB
tensorstow.set_memory_limit("1GiB")
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16)))
model, optimizer = stow(model, AdamW, lr=1e-3, plan="auto")
assert tensorstow.plan_of(model).states == "disk"
optimizer.close()
"""
    _printed(_LIMITED + code)


def test_without_a_descriptor_to_ask_the_kernel_nothing_fits() -> None:
    code = """
import os
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
files = []
try:
    while True:
        files.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
try:
    torch.empty(20 * MIB, dtype=torch.uint8)
except RuntimeError as error:
    refusal = str(error)
os.closerange(files[0], files[-1] + 1)
assert "can't allocate memory" in refusal
torch.empty(20 * MIB, dtype=torch.uint8)
"""
    _printed(_LIMITED + code)


def test_a_training_that_a_limit_ends_has_changed_nothing_and_goes_on_without(
    tmp_path: Path,
) -> None:
    code = f"""
from torch import nn
from tensorstow import AdamW, Plan, stow

def trained(limited):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    model, optimizer = stow(
        model, AdamW, lr=1e-3, dir={str(tmp_path)!r} + str(limited), durability="none",
        plan=Plan(parameters="disk", states="disk", overlap="forward"),
    )
    for step in range(3):
        if limited and step == 1:
            tensorstow.set_memory_limit(_native.resident_bytes() + MIB)
            assert "can't allocate memory" in refused_here(lambda: model(torch.ones(65536, 1024)))
            tensorstow.set_memory_limit(None)
        model(torch.ones(4, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    loss = model(torch.ones(4, 1024)).sum().item()
    optimizer.close()
    return loss

def refused_here(call):
    global limit
    limit = 1 << 60
    return refused(call)

tensorstow.set_memory_limit(None)
assert trained(True) == trained(False)
"""
    # Alone: its limit is a megabyte above what it has, and a fork maps pages of the parent later.
    _printed_alone(_LIMITED + code)


def test_a_limit_that_cannot_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match=r"1\.0 MiB of memory was requested, and the process has"):
        set_memory_limit("1MiB")
    with pytest.raises(OptionError, match="limit='much' is not a size"):
        set_memory_limit("much")
    with monkeypatch.context() as patch:
        patch.setattr(_native, "resident_bytes", lambda: 0)
        with pytest.raises(OptionError, match="/proc/self/statm cannot be read"):
            set_memory_limit("64GiB")
    assert _native.memory_limit() == 0
    code = """
from tensorstow import set_memory_limit
try:
    set_memory_limit("1TiB")
except Exception as error:
    print(error)
"""
    printed = _printed_alone(code, MALLOC_MMAP_THRESHOLD_="33554432")
    assert printed.startswith("A limit of memory needs torch's blocks from tensorstow's alloc")


@pytest.mark.parametrize(
    "nbytes", [1 << 20, (3 << 19) - 1, 3 << 19, 2 << 20, (2 << 20) + 1, 3 << 20, 3145729, 5 << 20]
)
def test_which_blocks_the_planner_counts_as_cached(nbytes: int) -> None:
    assert cache_large_blocks()
    before = _native.allocator_bytes()[0]
    block = torch.empty(nbytes, dtype=torch.uint8)
    assert (_native.allocator_bytes()[0] > before) == is_large(nbytes)
    del block
