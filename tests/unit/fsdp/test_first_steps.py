"""The first steps of ``plan="auto"`` beside what was predicted: one line, and the same bits."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow
from compare import all_equal
from machines import DISK, PROFILE
from tensorstow import AdamW, Budget
from tensorstow.base.profile import identify_machine, write_profile
from tensorstow.fsdp import automatic, first_steps
from tensorstow.fsdp.first_steps import HostRoom, compared_line, resident_line, spare_bytes
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.memory.buffer_pool import BufferPool
from tensorstow.report.run_record import Compared, PredictedStep

STEP = PredictedStep(1.0, "disk")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_is_as_planned_is_told() -> None:
    items = [
        Compared("HOST", "states", 800 << 20, 800 << 20),
        Compared("HOST", "parameters", 200 << 20, 390 << 20),
        Compared("HOST", "gradients", 1 << 40, None),
        Compared("DISK", "states", 1 << 30, 1 << 30),
    ]
    level, line = compared_line(items, STEP, 1.19)
    assert level == logging.INFO
    assert line == (
        "first steps as planned: HOST 1000.0 MiB predicted, 1.2 GiB measured (without gradients);"
        " DISK 1.0 GiB predicted, 1.0 GiB measured; a step 1 s predicted, 1.19 s measured"
    )


@pytest.mark.parametrize(
    ("measured", "seconds", "said"),
    [
        (1300, 1.0, ["HOST differs most in ring"]),
        (700, 1.0, ["HOST differs most in ring"]),
        (1000, 1.21, ["bound by disk", "calibrate"]),
        (1000, 0.79, ["bound by disk"]),
        (1300, 2.0, ["ring", "bound by disk"]),
    ],
)
def test_more_than_a_fifth_is_warned_of(measured: int, seconds: float, said: list[str]) -> None:
    items = [Compared("HOST", "states", 0, 0), Compared("HOST", "ring", 1000, measured)]
    level, line = compared_line(items, STEP, seconds)
    assert level == logging.WARNING
    for part in said:
        assert part in line


def test_the_memory_of_the_process_is_told_with_activations() -> None:
    assert "400.0 MiB when the model was placed, 1.0 GiB at most" in resident_line(
        400 << 20, 1 << 30
    )
    assert "its peak is not recorded" in resident_line(1, None)


def trained(count: int = 8, **given: object) -> tuple[nn.Module, AdamW]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(count)))
    model, optimizer = tensorstow.stow(model, partial(AdamW, lr=1e-2), **given)  # type: ignore[arg-type]
    assert isinstance(optimizer, AdamW)
    train(model, optimizer, 5)
    return model, optimizer


def train(model: nn.Module, optimizer: AdamW, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 1024)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.getMessage().startswith("first steps")]


def test_one_line_is_logged_and_no_bit_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    monkeypatch.setattr(first_steps, "_OFF", 1e9)  # the machine may be busy
    write_profile(PROFILE.but(machine=identify_machine(), directories={"/": DISK}))
    model, optimizer = trained(budget=Budget(host=(128 << 20) - 1), tokens=2)
    (line,) = lines(caplog)
    assert "as planned" in line
    for part in ("HOST", "DISK", "a step", "s predicted", "s measured", "with activations"):
        assert part in line
    report = tmp_path / "report"
    optimizer.report(report)
    told = json.loads((report / "report.json").read_text())["predicted_step"]
    assert f"a step {told['seconds']:.3g} s predicted" in line
    assert f"a step, bound by {told['binding']}" in (report / "report.html").read_text()
    optimizer.close()
    plan = tensorstow.plan_of(model)
    assert plan.states == "disk"
    caplog.clear()
    again, other = trained(plan=plan)
    assert all_equal(list(again.parameters()), list(model.parameters()))
    assert lines(caplog) == []
    other.close()


def test_seconds_are_compared_only_where_they_were_predicted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    trained(count=1)[1].close()
    (line,) = lines(caplog)
    assert "s measured, not predicted without rates and tokens=" in line
    assert "as planned" in line


def test_a_fifth_of_what_is_free_and_what_the_process_has_stays_free() -> None:
    assert spare_bytes(50, 50) == 30
    assert spare_bytes(20, 80) == 0
    assert spare_bytes(10, 90) == -10


def test_buffers_of_parameters_on_disk_follow_what_is_free(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    small = Budget(host="94MiB", disk="1GiB")
    monkeypatch.setattr(automatic, "machine_budget", lambda *_, **__: small)
    monkeypatch.setattr(first_steps, "own_host_bytes", lambda _: 1 << 40)
    weights = []
    for number, given in enumerate(({}, {"budget": small})):  # one that is given is kept to
        caplog.clear()
        model, optimizer = trained(dir=tmp_path / str(number), **given)
        assert tensorstow.plan_of(model).parameters == "disk"
        told = [text for text in caplog.messages if "may stay in memory now" in text]
        moved = [text for text in caplog.messages if "moved from" in text]
        assert len(told) == len(moved) == (not given)
        before = parameter_bytes(model)
        train(model, optimizer, 1)
        after = parameter_bytes(model)
        transfers = (
            after.bytes_read - before.bytes_read,
            after.bytes_written - before.bytes_written,
        )
        assert (transfers == (0, 0)) == (not given)  # all units have moved to HOST
        weights.append([p.full_tensor() for p in model.parameters()])
        optimizer.close()
    assert all_equal(*weights)


def test_buffers_are_resized_by_the_least_that_was_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = BufferPool([tmp_path], 8 << 20, 4 << 20, 1 << 20)
    buffers = [pool.add(1 << 20) for _ in range(8)]
    for number, buffer in enumerate(buffers):
        buffer.pin()
        buffer.bytes.fill_(number)
        buffer.unpin(dirty=True)
    room = HostRoom({str(number): [buffer] for number, buffer in enumerate(buffers)})
    monkeypatch.setattr(first_steps, "resident_bytes", lambda: 5 << 20)
    for free in (9, 5, 7):
        monkeypatch.setattr(first_steps, "own_host_bytes", lambda _, free=free: free << 20)
        room.measure()
    room.follow()
    assert pool.memory.capacity == 7 << 20  # 5 MiB were free, and a fifth of 10 stays so
    assert [buffer.pins for buffer in buffers] == 3 * [1] + 5 * [0]  # 3 MiB more than planned
    buffers[2].bytes.fill_(42)
    buffers[2].pin(for_write=True)
    written = pool.bytes_written
    buffers[2].unpin(dirty=True)
    assert pool.bytes_written == written  # it is on HOST
    monkeypatch.setattr(first_steps, "own_host_bytes", lambda _: 0)
    room.measure()
    room.follow()
    assert pool.memory.capacity == 6 << 20
    assert [buffer.pins for buffer in buffers] == [1, 1, *6 * [0]]
    assert pool.bytes_written == written + (1 << 20)
    for number, buffer in [*enumerate(buffers), *enumerate(buffers)]:  # others are evicted
        buffer.pin()
        assert buffer.bytes.eq(42 if number == 2 else number).all()
        buffer.unpin()
    pool.close()
