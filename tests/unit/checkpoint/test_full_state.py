"""``state_dict`` of states on disk: a file that is mapped, with the values that RAM would have."""

import copy
import errno
import gc
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from process_counts import open_descriptors
from states_on_disk import printed
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import DirectoryError, OptionError, TransferError
from tensorstow.checkpoint import full_state

MIB = 1 << 20
SIZES = [5000, 3, 0, 70_000, 16, 9001]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Map states of any size."""
    monkeypatch.setattr(full_state, "RAM_BYTES", -1)


def trained(directory: Path, dtype: torch.dtype, steps: int = 2, **options: object) -> AdamW:
    """Return an optimizer whose parameters span chunks, share them, or have no elements."""
    generator = torch.Generator().manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in SIZES]
    policy = PipelinePolicy(chunk_elements=4096)
    given = {"states": "disk", "dir": directory, "policy": policy} | options
    optimizer = AdamW(weights, lr=0.1, **given)  # type: ignore[arg-type]
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(dtype)
        optimizer.step()
    return optimizer


def differing(a: dict[str, Any], b: dict[str, Any]) -> list[object]:
    assert a["state"].keys() == b["state"].keys()
    assert a["param_groups"] == b["param_groups"]
    assert all(a["state"][i].keys() == b["state"][i].keys() for i in a["state"])
    return [
        (i, name)
        for i, entry in a["state"].items()
        for name, tensor in entry.items()
        if not torch.equal(tensor, b["state"][i][name])
    ]


CASES: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {"durability": "none"}),
    (torch.float32, {"durability": "none", "states": 0.5, "amsgrad": True}),
    (torch.float16, {}),
    (torch.bfloat16, {"amsgrad": True}),
    (torch.bfloat16, {"durability": "none", "states": 0.3}),
    (torch.bfloat16, {"state_format": "fp32"}),
    (torch.bfloat16, {"state_format": "bf16"}),
    (torch.bfloat16, {"state_format": "int8", "durability": "none", "states": 0.5}),
    (torch.bfloat16, {"state_format": "int8", "states": "ram"}),
]


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize(("dtype", "options"), CASES, ids=str)
def test_the_mapped_states_are_those_in_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    optimizer = trained(tmp_path, dtype, **options)
    in_ram = copy.deepcopy(optimizer.state_dict())
    monkeypatch.setattr(full_state, "RAM_BYTES", -1)
    opened = open_descriptors()
    mapped = optimizer.state_dict()
    assert open_descriptors() == opened + 1
    assert differing(mapped, in_ram) == []
    optimizer.close()
    assert differing(mapped, in_ram) == []
    torch.save(mapped, tmp_path / "x.pt")
    assert differing(torch.load(tmp_path / "x.pt", weights_only=True), in_ram) == []
    for entry in mapped["state"].values():
        entry["exp_avg"].add_(1.0)  # it is the caller's to change
    assert len(differing(mapped, in_ram)) == len(SIZES) - 1


@pytest.mark.usefixtures("always")
def test_the_states_are_of_one_moment(tmp_path: Path) -> None:
    optimizer = trained(tmp_path, torch.float32, overlap="none")
    before = optimizer.state_dict()
    kept = copy.deepcopy(before)
    optimizer.step()
    assert differing(before, kept) == []
    assert len(differing(optimizer.state_dict(), kept)) == 3 * len(SIZES) - 2


@pytest.mark.usefixtures("always")
def test_a_mapped_state_dict_is_loaded_into_any_place(tmp_path: Path) -> None:
    optimizer = trained(tmp_path, torch.bfloat16, state_format="split", durability="none")
    mapped = optimizer.state_dict()
    other = trained(tmp_path, torch.bfloat16, steps=0, states="ram", dir=None)
    other.load_state_dict(mapped)
    assert differing(other.state_dict(), mapped) == []


@pytest.mark.usefixtures("always")
def test_a_weight_written_by_others_is_the_master(tmp_path: Path) -> None:
    optimizer = trained(tmp_path, torch.bfloat16)
    weight = optimizer.param_groups[0]["params"][3]
    with torch.no_grad():
        weight[40_000] = 3.0
    master = optimizer.state_dict()["state"][3]["master"]
    assert torch.equal(master, weight.float())


@pytest.mark.usefixtures("always", "garbage_apart")
def test_the_file_is_gone_with_the_tensors(tmp_path: Path) -> None:
    optimizer = trained(tmp_path, torch.float32, durability="none")
    names, before = list(tmp_path.iterdir()), open_descriptors()
    saved = optimizer.state_dict()
    assert list(tmp_path.iterdir()) == names
    del saved
    gc.collect()
    assert open_descriptors() == before


@pytest.mark.usefixtures("garbage_apart")
def test_few_states_stay_in_ram(tmp_path: Path) -> None:
    optimizer = trained(tmp_path, torch.float32, durability="none")
    before = open_descriptors()
    saved = optimizer.state_dict()
    assert open_descriptors() == before
    assert saved["state"]


@pytest.mark.usefixtures("always")
def test_too_little_room_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = trained(tmp_path, torch.float32)
    found = full_state.inspect_directory(tmp_path)

    class Full:
        path, free_bytes = found.path, 1000

    optimizer.synchronize()
    read = optimizer._traffic().bytes_read
    monkeypatch.setattr(full_state, "inspect_directory", lambda _: Full)
    with pytest.raises(DirectoryError, match=r"656\.\d KiB.*1000 B free.*snapshot"):
        optimizer.state_dict()
    assert optimizer._traffic().bytes_read == read
    monkeypatch.undo()
    optimizer.step()


@pytest.mark.usefixtures("always")
def test_a_write_that_fails_leaves_the_optimizer_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = trained(tmp_path, torch.float32)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(TransferError, match="ENOSPC") as kept:
            optimizer.state_dict()
    # While somebody holds the exception too: a commit, on its own thread, goes on.
    lock = optimizer._states().pipeline.lock
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lock.acquire, timeout=5).result()
        other.submit(lock.release).result()
    assert kept.value.errno == errno.ENOSPC
    optimizer.step()
    optimizer.commit()


@pytest.mark.usefixtures("always")
def test_an_open_step_is_refused(tmp_path: Path) -> None:
    net = torch.nn.Linear(100, 100)
    optimizer = AdamW(
        net.parameters(), states="disk", dir=tmp_path, overlap="backward", durability="none"
    )
    net(torch.ones(1, 100)).sum().backward()
    with pytest.raises(OptionError, match="Call step"):
        optimizer.state_dict()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].any()


CHILD = """
opt = trained(2, 1 << 20, getattr(torch, sys.argv[2]), sys.argv[3])
reset()
peak, anonymous = memory("VmHWM"), memory("RssAnon")
saved = opt.state_dict()
print(sum(t.nbytes for e in saved["state"].values() for t in e.values()) >> 20)
print(memory("VmHWM") - peak)
torch.save(saved, path + "/x.pt")
opt.load_state_dict(saved)
print(memory("RssAnon") - anonymous)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "durability", "states"),
    [("float32", "none", 128), ("bfloat16", "commit", 192)],
)
def test_memory_does_not_grow_by_the_states(
    tmp_path: Path, dtype: str, durability: str, states: int
) -> None:
    nbytes, grown, anonymous = printed(CHILD, tmp_path, dtype, durability)
    assert nbytes == states
    assert grown < 24
    assert anonymous < 64  # loading rounds the masters of one parameter at a time (16)
