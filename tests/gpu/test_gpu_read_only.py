"""Models that are only read on an accelerator: weights there, in pinned host memory, in files."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from training import spin

import tensorstow
from generated import AXES, allowed, both
from models import ResidualStack
from parity.cover import Row, all_pairs
from tensorstow import Budget, Plan
from tensorstow.base.errors import BudgetError
from tensorstow.fsdp.read_only import stream_of
from tensorstow.fsdp.weight_stream import WeightStream
from tensorstow.io.device_link import DeviceMemory, StreamLink

WIDTH, BLOCKS = 64, 6
BLOCK_BYTES = 4 * WIDTH * (WIDTH + 1)
LATE = 0.1
PLANS = {
    "device": Plan(parameters="device"),
    "host": Plan(),
    "disk": Plan(parameters="disk"),
    "disk-alone": Plan(parameters="disk", prefetch=0),
    "all": Plan(parameter_units={"blocks.1": "device", "blocks.2": "disk", "blocks.5": "disk"}),
}


def saved(folder: Path, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Save a model to ``folder``; return an input on the device, and what the model makes of it."""
    torch.manual_seed(0)
    net = ResidualStack(WIDTH, BLOCKS)
    save_file(net.state_dict(), folder / "model.safetensors")
    x = torch.randn(4, WIDTH).to(device)
    with torch.no_grad():
        return x, net.to(device)(x).cpu()


def stowed(folder: Path, **given: Any) -> tuple[nn.Module, WeightStream | None]:  # noqa: ANN401
    with torch.device("meta"):
        model = ResidualStack(WIDTH, BLOCKS)
    model, _ = tensorstow.stow(model, None, weights=folder, **given)
    torch.accelerator.synchronize()
    return model, stream_of(model)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_wherever_weights_are_results_are_the_same(
    device: torch.device,
    tmp_path: Path,
    plan: Plan,
    mode: Any,  # noqa: ANN401
) -> None:
    x, expected = saved(tmp_path, device)
    model, stream = stowed(tmp_path, plan=plan)
    assert all(p.device == device for p in model.parameters())
    with mode():
        for _ in range(3):
            assert torch.equal(model(x).cpu(), expected)
    if stream is not None:
        assert isinstance(stream.link, StreamLink)
        moving = sum(call.unit.nbytes for call in stream.calls)
        ahead = 3 * max(call.unit.nbytes for call in stream.calls)
        assert 3 * moving - ahead <= stream.link.bytes_up <= 3 * moving + ahead
        assert stream.device.memory.peak <= (plan.prefetch + 1) * (BLOCK_BYTES + 8192)


@pytest.mark.parametrize("where", ["cpu", "device"])
def test_a_model_with_values_of_its_own_needs_no_files(device: torch.device, where: str) -> None:
    torch.manual_seed(0)
    net, x = ResidualStack(WIDTH, BLOCKS), torch.randn(4, WIDTH, device=device)
    expected = ResidualStack(WIDTH, BLOCKS)
    expected.load_state_dict(net.state_dict())
    net = net.to(device if where == "device" else "cpu")
    budget = Budget(device=4 * (BLOCK_BYTES + 4096), host="1MiB")
    model, _ = tensorstow.stow(net, None, budget=budget)
    tiers = [tensorstow.plan_of(model).tier_of(f"blocks.{i}") for i in range(BLOCKS)]
    assert set(tiers) == {"device", "host"}
    for _ in range(2):
        assert torch.equal(model(x), expected.to(device)(x))


def test_weights_are_cast_on_their_way_up(device: torch.device, tmp_path: Path) -> None:
    x, _ = saved(tmp_path, device)
    outputs = []
    for plan in PLANS.values():
        model, _ = stowed(tmp_path, plan=plan, compute_dtype=torch.bfloat16)
        outputs.append(model(x.bfloat16()).cpu())
    assert all(torch.equal(each, outputs[0]) for each in outputs)


def test_a_budget_fills_the_device_then_the_host(device: torch.device, tmp_path: Path) -> None:
    x, expected = saved(tmp_path, device)
    device_bytes, host_bytes = 5 * BLOCK_BYTES, 4 * (BLOCK_BYTES + 4096)
    budget = Budget(device=device_bytes, host=host_bytes)
    model, stream = stowed(tmp_path, budget=budget)
    plan = tensorstow.plan_of(model)
    tiers = [plan.tier_of(f"blocks.{i}") for i in range(BLOCKS)]
    assert set(tiers) == {"device", "host", "disk"}
    assert stream is not None
    assert stream.device.memory.capacity + tiers.count("device") * BLOCK_BYTES <= device_bytes
    assert stream.host.memory.capacity + tiers.count("host") * BLOCK_BYTES <= host_bytes
    assert torch.equal(model(x).cpu(), expected)
    model, stream = stowed(tmp_path, budget=Budget(device="1MiB", host=0))
    assert stream is None
    model, _ = stowed(tmp_path, budget=Budget(device=3 * (BLOCK_BYTES + 4096), host="1MiB"))
    assert tensorstow.plan_of(model) == Plan()
    with pytest.raises(BudgetError, match="the largest unit has"):
        stowed(tmp_path, budget=Budget(device=BLOCK_BYTES // 2))


# Beam search changes what it copies up before the copy is over, with all weights on the device too.
ROWS = all_pairs({**AXES, "call": ("forward", "generate")}, allowed)[::3]
"""Every third of the rows: tests/unit/fsdp/test_read_only_matrix.py has all of them on the CPU."""


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_a_generating_model_has_the_bits_of_one_in_memory(
    row: Row, device: torch.device, tmp_path: Path
) -> None:
    expected, told = both(row, tmp_path, device)
    assert len(told) == len(expected) >= 2
    assert all(torch.equal(a, b) for a, b in zip(told, expected, strict=True))


# --- what is waited for ---


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_unit_is_computed_with_behind_its_copy(
    device: torch.device, tmp_path: Path, kind: str
) -> None:
    x, expected = saved(tmp_path, device)
    model, stream = stowed(tmp_path, plan=PLANS[kind])
    assert stream is not None
    assert isinstance(stream.link, StreamLink)
    with stream.link._h2d_stream:
        spin(device, LATE)
    assert torch.equal(model(x).cpu(), expected)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_copy_that_did_not_begin_leaves_no_values(
    device: torch.device, tmp_path: Path, kind: str
) -> None:
    x, expected = saved(tmp_path, device)
    model, _ = stowed(tmp_path, plan=PLANS[kind])

    def fail(*_: object) -> None:
        message = "the link is lost"
        raise RuntimeError(message)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamLink, "h2d", fail)
        with pytest.raises(RuntimeError, match="link is lost"):
            model(x)
    assert torch.equal(model(x).cpu(), expected)


def test_a_buffer_is_filled_behind_its_last_use(device: torch.device, tmp_path: Path) -> None:
    x, expected = saved(tmp_path, device)
    model, _ = stowed(tmp_path, plan=Plan(prefetch=0))
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: spin(device, LATE / 8))
    for _ in range(2):
        assert torch.equal(model(x).cpu(), expected)


def test_host_memory_is_read_into_behind_its_copy(device: torch.device, tmp_path: Path) -> None:
    x, expected = saved(tmp_path, device)
    model, stream = stowed(tmp_path, plan=PLANS["disk-alone"])
    assert stream is not None
    assert isinstance(stream.link, StreamLink)
    for _ in range(2):
        with stream.link._h2d_stream:
            spin(device, LATE)
        assert torch.equal(model(x).cpu(), expected)


@pytest.mark.parametrize("late", ["read", "copy"])
def test_who_waits_sleeps(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """It would ask again and again otherwise, on a core that computes."""
    x, expected = saved(tmp_path, device)
    model, stream = stowed(tmp_path, plan=PLANS["disk-alone"])
    assert stream is not None
    assert isinstance(stream.link, StreamLink)
    tries: list[str] = []
    for name in ("_try_to_attach", "_try_to_read_ahead"):
        call = getattr(stream, name)
        monkeypatch.setattr(stream, name, partial(lambda f, *of: tries.append("") or f(*of), call))
    if late == "read":
        file = stream.calls[0].unit.runs[0].file
        file.engine.inject_fault("read", times=-1, delay_us=int(1e6 * LATE / 2))
    else:
        with stream.link._h2d_stream:
            spin(device, LATE)
    assert torch.equal(model(x).cpu(), expected)
    assert len(tries) <= 6 * len(stream.calls)


def test_a_new_buffer_is_filled_behind_the_last_use_of_its_memory(device: torch.device) -> None:
    link, count = StreamLink(device), 1 << 16
    before = torch.ones(count, device=device)
    torch.accelerator.synchronize()
    spin(device, LATE)
    copy = before.clone()
    del before
    memory = DeviceMemory(4 * count, link)
    pinned = torch.full((4 * count,), 7, dtype=torch.uint8, pin_memory=True)
    link.join(link.h2d([(memory.bytes, pinned)], [memory.last_use]))
    assert copy.eq(1).all()


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_weights_go_up_from_pinned_memory(device: torch.device, tmp_path: Path, kind: str) -> None:
    from tensorstow.io.pinned import pinned_bytes  # noqa: PLC0415

    x, _ = saved(tmp_path, device)
    before = pinned_bytes()
    model, _ = stowed(tmp_path, plan=PLANS[kind])
    model(x)
    pinned = tensorstow.usage(model).parameters.pinned_bytes
    assert pinned_bytes() - before == pinned >= (BLOCKS if kind == "host" else 3) * BLOCK_BYTES
