import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow import Plan, Tier
from tensorstow.base.errors import OptionError, StowError
from tensorstow.optim import recording

POLICY = tensorstow.PipelinePolicy(chunk_elements=1 << 10)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))


def take(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        torch.manual_seed(step)
        model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module, place: Path, **given: object) -> tensorstow.AdamW:
    return tensorstow.AdamW(
        model.parameters(), states="disk", dir=place, module=model, policy=POLICY, **given
    )


def reported(optimizer: object, out: Path) -> dict:
    files = optimizer.report(out)
    assert "<h1>tensorstow: a run of" in files["page"].read_text()
    trace = json.loads(files["trace"].read_text())["traceEvents"]
    named = {e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    return {**json.loads(files["figures"].read_text()), "trace": trace, "named": named}


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_a_recording_changes_no_bit_and_has_every_lane(tmp_path: Path, overlap: str) -> None:
    plain, recorded = make_model(), make_model()
    with adam(plain, tmp_path / "plain", overlap=overlap) as optimizer:
        for steps in (1, 3, 1):
            take(plain, optimizer, steps)
    with adam(recorded, tmp_path / "run", overlap=overlap, commit_every=2) as optimizer:
        take(recorded, optimizer, 1)
        with optimizer.recording():
            take(recorded, optimizer, 3)
            optimizer.synchronize()  # beside forward the last step's states are not written yet
        take(recorded, optimizer, 1)
        optimizer.wait()
        figures = reported(optimizer, tmp_path / "out")
    assert all(
        torch.equal(p, q) for p, q in zip(plain.parameters(), recorded.parameters(), strict=True)
    )
    assert figures["steps"] == 3
    names = [e["name"] for e in figures["trace"] if e.get("cat") == "compute"]
    assert names == ["forward", "backward", "opt.step"] * 3
    kinds = {name.partition(" (")[0] for name in figures["named"]}
    assert {"compute", "update", "write", "wait"} <= kinds
    assert f"write ({tmp_path / 'run'})" in figures["named"]
    moved = figures["moved"]
    assert moved["states written"] >= 3 * 8 * 4 * 33 * 32
    assert figures["written"] == moved["states written"]
    assert {"process", "states", "disk"} <= figures["peak_bytes"].keys()
    assert figures["disk_bytes"] == figures["peak_bytes"]["disk"] > 0
    assert figures["dropped"] == 0


def test_lanes_are_of_their_directories(tmp_path: Path) -> None:
    model = make_model()
    places = [tmp_path / "one", tmp_path / "two"]
    optimizer = tensorstow.AdamW(
        model.parameters(), states="disk", dir=places, durability="none", policy=POLICY
    )
    with optimizer, optimizer.recording():
        take(model, optimizer, 2)
    named = reported(optimizer, tmp_path / "out")["named"]
    assert {f"write ({place})" for place in places} <= named


def test_what_is_outside_of_the_block_is_not_in_it(tmp_path: Path) -> None:
    model = make_model()
    with adam(model, tmp_path / "run") as optimizer:
        with optimizer.recording():
            take(model, optimizer, 1)
        take(model, optimizer, 4)
        first = reported(optimizer, tmp_path / "one")
        with optimizer.recording():
            take(model, optimizer, 2)
        second = reported(optimizer, tmp_path / "two")
    assert (first["steps"], second["steps"]) == (1, 2)
    ends = [e["ts"] + e.get("dur", 0) for e in second["trace"] if "ts" in e]
    assert min(ends) >= 0
    assert max(ends) <= second["seconds"] * 1e6 + 1
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_bytes_are_those_of_the_recorded_steps(tmp_path: Path) -> None:
    """By the counters, and by the log of events: each byte is on a lane once."""
    model = make_model()
    with adam(model, tmp_path, durability="none", ram_budget="100KiB") as optimizer:
        take(model, optimizer, 2)
        optimizer.synchronize()
        before = optimizer._traffic()
        with optimizer.recording():
            take(model, optimizer, 3)
            optimizer.synchronize()
        after = optimizer._traffic()
        figures = reported(optimizer, tmp_path / "out")
        memory = optimizer._memory()
    counted = {
        "states read": after.bytes_read - before.bytes_read,
        "states written": after.bytes_written - before.bytes_written,
        "states not read again": after.bytes_spared - before.bytes_spared,
        "from the accelerator": 0,
        "to the accelerator": 0,
    }
    assert figures["moved"] == counted
    assert 0 < counted["states not read again"] < counted["states read"]
    assert counted["states read"] < counted["states written"] == figures["written"]
    for lane, name in (("read", "states read"), ("write", "states written")):
        spans = [e for e in figures["trace"] if str(e.get("cat")).startswith(lane)]
        assert sum(e.get("args", {}).get("bytes", 0) for e in spans) == counted[name]
    assert figures["peak_bytes"]["states"] == memory.host_bytes > 0


def test_a_log_that_was_full_says_how_many_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_MOST_SPANS", 4)
    model = make_model()
    with adam(model, tmp_path / "run") as optimizer:
        with optimizer.recording():
            take(model, optimizer, 2)
        figures = reported(optimizer, tmp_path / "out")
    assert figures["dropped"] == 2


def test_micro_batches_are_told_apart(tmp_path: Path) -> None:
    model = make_model()
    with adam(model, tmp_path / "run") as optimizer, optimizer.recording():
        for _ in range(2):
            model(torch.randn(4, 32)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.randn(4, 32))
    trace = reported(optimizer, tmp_path / "out")["trace"]
    names = [e["name"] for e in trace if e.get("cat") == "compute"]
    assert names == ["forward", "backward", "forward", "backward", "opt.step", "forward"]


def test_a_stowed_model_says_what_its_weights_do_and_what_was_predicted(tmp_path: Path) -> None:
    plan = Plan(parameters=Tier.DISK, states=Tier.DISK, overlap="backward")
    make = partial(tensorstow.AdamW, policy=POLICY, durability="none")
    model, optimizer = tensorstow.stow(make_model(), make, plan=plan, dir=tmp_path)
    take(model, optimizer, 1)
    with optimizer.recording():
        take(model, optimizer, 3)
    figures = reported(optimizer, tmp_path / "out")
    assert figures["moved"]["weights written"] > 0
    assert figures["written"] == sum(
        n for name, n in figures["moved"].items() if name.endswith("written")
    )
    assert any(name.startswith("weights written (") for name in figures["named"])
    by_name = {(each["tier"], each["what"]): each for each in figures["plan"]}
    on_disk = by_name["DISK", "parameters"]
    assert on_disk["predicted"] == on_disk["measured"] > 0
    assert figures["disk_bytes"] == on_disk["measured"] + optimizer._memory().file_bytes
    assert figures["peak_bytes"]["disk"] == figures["disk_bytes"]
    assert by_name["HOST", "gradients"]["measured"] is None
    optimizer.close()


def test_without_a_recording_there_are_totals(tmp_path: Path) -> None:
    model = make_model()
    with adam(model, tmp_path / "run") as optimizer:
        take(model, optimizer, 2)
        figures = reported(optimizer, tmp_path / "out")
    assert (figures["seconds"], figures["steps"], figures["named"]) == (0.0, 0, set())
    assert figures["moved"]["states written"] > 0


def test_any_torch_optimizer_is_recorded_without_lanes_of_disks(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 2048), nn.Linear(2048, 32))
    optimizer = tensorstow.StowedOptimizer(
        torch.optim.SGD,
        model.parameters(),
        lr=0.1,
        momentum=0.9,
        states="disk",
        dir=tmp_path,
        ram_budget="300KiB",
    )
    take(model, optimizer, 1)
    assert reported(optimizer, tmp_path / "none")["seconds"] == 0.0
    with optimizer.recording(model):
        take(model, optimizer, 2)
    figures = reported(optimizer, tmp_path / "out")
    assert figures["named"] == {"compute"}
    assert figures["moved"]["states written"] > 0
    optimizer.close()


def test_an_error_inside_ends_it_and_keeps_what_there_was(tmp_path: Path) -> None:
    model = make_model()
    optimizer = adam(model, tmp_path / "run")

    def fail() -> None:
        with optimizer.recording():
            take(model, optimizer, 2)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert reported(optimizer, tmp_path / "out")["steps"] == 2
    assert not model._forward_hooks
    optimizer.close()


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    model = make_model()
    with adam(model, tmp_path / "run") as optimizer:
        with (
            optimizer.recording() as recording,
            pytest.raises(OptionError, match="during a recording"),
        ):
            optimizer.report(tmp_path / "out")
        with pytest.raises(OptionError, match="a second time"):
            recording.__enter__()
        (tmp_path / "file").touch()
        with pytest.raises(StowError, match="A file has that name"):
            optimizer.report(tmp_path / "file")


def test_a_wait_for_a_commit_is_a_stall(tmp_path: Path) -> None:
    model = make_model()
    with adam(model, tmp_path / "run") as optimizer:
        take(model, optimizer, 1)
        with optimizer.recording():
            begun = time.monotonic()
            for _ in range(3):
                take(model, optimizer, 1)
                optimizer.commit()
            took = time.monotonic() - begun
        stalls = reported(optimizer, tmp_path / "out")["stalls"]
    assert 0 < stalls["a commit being made durable"] <= took
