"""Gemini's plugin on an accelerator: what is placed where, and the bits of torch's training."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload

import tensorstow
from compare import all_equal
from parity.cover import feasible_pairs
from ranks.boosted import boosted
from ranks.matrix import GEMINI_ON_DEVICE, boosted_configs, every, named
from ranks.pool import Ranks
from ranks.stowed import RunConfig, alone
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.accelerator import get_accelerator
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tensorstow.colossalai.zero import GeminiDDP, GeminiOptimizer
from tensorstow.fsdp import device_cache
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.tensors.dtensor import shard_of

BLOCKS, WIDTH = 8, 64


def model_of() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 4))


def batch(step: int, device: torch.device) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)


def train(device: torch.device, steps: int = 3, **plugin: Any) -> tuple[nn.Module, Any]:  # noqa: ANN401
    return trained_by(GeminiPlugin(**plugin), device, steps)


def trained_by(plugin: Plugin, device: torch.device, steps: int = 3) -> tuple[nn.Module, Any]:
    booster = Booster(plugin=plugin)
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
    for step in range(steps):
        booster.backward(model(batch(step, device)).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [
        (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().cpu()
        for p in model.parameters()
    ]


@pytest.fixture
def in_fp32(device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Return the weights with everything in host memory."""
    model, optimizer = train(device, placement_policy="cpu", precision="fp32")
    yield whole(model)
    optimizer.close()


POLICIES: list[dict[str, Any]] = [
    {"placement_policy": "const"},
    {"placement_policy": "static", "offload_optim_frac": 1.0},
    {"placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 0.5},
    {"placement_policy": "cpu", "max_prefetch": 2},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_same_bits_wherever_states_are_in_host_memory(
    device: torch.device, in_fp32: list[torch.Tensor], policy: dict[str, Any]
) -> None:
    model, optimizer = train(device, precision="fp32", **policy)
    assert all_equal(whole(model), in_fp32)
    optimizer.close()


MIXED: list[dict[str, Any]] = [
    {"placement_policy": "cuda"},
    {"placement_policy": "static", "offload_optim_frac": 0.5},
    {"placement_policy": "static", "offload_optim_frac": 0.75, "offload_param_frac": 0.5},
]


@pytest.mark.parametrize("policy", MIXED, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fractions_of_bytes_are_where_they_were_asked(
    device: torch.device, policy: dict[str, Any], precision: str
) -> None:
    """Torch's rule updates what stays on the device, a few ULP apart.

    On CUDA the third step's gradients in 16 bits have rounded apart by that.
    """
    clip = {"max_norm": 0.05, "initial_scale": 64}
    steps = 2 if device.type == "cuda" and precision != "fp32" else 3
    model, optimizer = train(device, steps, precision=precision, **policy, **clip)
    total = sum(p.numel() for p in model.parameters())
    optim, param = (policy.get(f"offload_{n}_frac", 0.0) for n in ("optim", "param"))
    unit = WIDTH * WIDTH + WIDTH
    assert abs(parameter_bytes(model).host_bytes / 4 - param * total) <= unit
    assert abs(optimizer._memory().logical_bytes / 8 - optim * total) <= WIDTH
    for p in model.parameters():
        states = optimizer.optim.state[p]["exp_avg"]
        assert storage_of(p) is None or shard_of(states).is_cpu
    same, other = train(device, steps, precision=precision, placement_policy="cpu", **clip)
    for ours, theirs in zip(whole(model), whole(same), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert optimizer.get_grad_norm() == pytest.approx(other.get_grad_norm(), rel=1e-3)
    optimizer.close()
    other.close()


@pytest.mark.parametrize(
    ("steady", "warmup", "first", "later"),
    [(0.0, 0.0, 0, 0), (0.9, None, 3, BLOCKS), (None, 0.0, 3, 0)],
)
def test_auto_lets_units_stay_on_the_device_by_what_it_measures(
    device: torch.device,
    in_fp32: list[torch.Tensor],
    steady: float | None,
    warmup: float | None,
    first: int,
    later: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps by both ratios, the rest by one and what these took."""
    monkeypatch.setattr(device_cache, "_CACHES", weakref.WeakSet())
    _, total = torch.accelerator.get_memory_info(device)
    unit = 4 * (WIDTH * WIDTH + WIDTH)
    part = 3.5 * unit / total  # three blocks have room, and the small head
    ratios = {
        "warmup_non_model_data_ratio": 1.0 - part if warmup is None else warmup,
        "steady_cuda_cap_ratio": part if steady is None else steady,
    }
    booster = Booster(plugin=GeminiPlugin(placement_policy="auto", precision="fp32", **ratios))
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
    stayed = []
    for step in range(3):
        booster.backward(model(batch(step, device)).square().mean(), optimizer)
        stayed.append(parameter_bytes(model).device_cache_bytes)
        optimizer.step()
        optimizer.zero_grad()
    assert [(n + unit // 9) // unit for n in stayed] == [first, first, later]
    assert all_equal(whole(model), in_fp32)
    optimizer.close()


def test_states_on_the_device_are_saved_and_loaded(device: torch.device, tmp_path: Any) -> None:  # noqa: ANN401
    model, optimizer = train(device, precision="bf16", offload_optim_frac=0.5)
    booster = Booster(plugin=GeminiPlugin(precision="bf16"))
    booster.save_model(model, tmp_path / "m")
    booster.save_optimizer(optimizer, tmp_path / "o", shard=True)
    again, fresh = train(device, steps=0, precision="bf16", offload_optim_frac=0.5)
    booster.load_model(again, tmp_path / "m")
    booster.load_optimizer(fresh, tmp_path / "o")
    for m, o in ((model, optimizer), (again, fresh)):
        o.backward(m(batch(9, device)).float().square().mean())
        o.step()
    assert all_equal(whole(again), whole(model))
    optimizer.close()
    fresh.close()


def test_upstreams_precision_where_an_accelerator_computes(device: torch.device) -> None:
    model, *_ = Booster(plugin=GeminiPlugin()).boost(model_of())
    assert model(batch(0, device)).dtype == torch.float16


@pytest.mark.parametrize("prefetch", [0, 2])
def test_units_go_up_ahead_as_many_as_asked(
    device: torch.device, prefetch: int, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"placement_policy": "cpu", "max_prefetch": prefetch, "verbose": True}
    model, optimizer = train(device, steps=1, **given)
    assert tensorstow.plan_of(model.unwrap()).prefetch == prefetch
    below = sum(p.nbytes for p in model_of().parameters()) / 2**20
    assert f"{below:.2f} MiB of this rank's parameters in host memory" in caplog.text
    optimizer.close()


OTHERS: list[tuple[type[Plugin], dict[str, Any], bool, bool]] = [
    (LowLevelZeroPlugin, {"stage": 1, "precision": "fp32"}, False, False),
    (LowLevelZeroPlugin, {"stage": 2, "precision": "fp32", "cpu_offload": True}, False, True),
    (TorchFSDPPlugin, {}, False, False),
    (TorchFSDPPlugin, {"cpu_offload": CPUOffload(offload_params=True)}, True, True),
]


@pytest.mark.parametrize(("plugin", "given", "parameters", "states"), OTHERS, ids=str)
def test_other_plugins_place_what_they_are_told_to(
    device: torch.device,
    in_fp32: list[torch.Tensor],
    plugin: type[Plugin],
    given: dict[str, Any],
    parameters: bool,  # noqa: FBT001
    states: bool,  # noqa: FBT001
) -> None:
    """``parameters`` and ``states``: whether these are in host memory."""
    model, optimizer = trained_by(plugin(**given), device)
    assert (parameter_bytes(model).host_bytes > 0) == parameters
    for p in model.parameters():
        assert shard_of(optimizer.optim.state[p]["exp_avg"]).is_cpu == states
    if states:
        assert all_equal(whole(model), in_fp32)
    else:
        for ours, theirs in zip(whole(model), in_fp32, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    optimizer.close()


def test_ddp_moves_a_model_and_refuses_one_whose_optimizer_would_be_left_behind(
    device: torch.device,
) -> None:
    booster = Booster(plugin=TorchDDPPlugin())
    model, *_ = booster.boost(model_of())
    assert {p.device.type for p in model.parameters()} == {device.type}
    left = model_of()
    with pytest.raises(OptionError, match="move the model first"):
        booster.boost(left, torch.optim.SGD(left.parameters()))


def test_ddp_synchronizes_batch_norm(device: torch.device) -> None:
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model, *_ = Booster(plugin=TorchDDPPlugin()).boost(norm)
    assert any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
    model(torch.randn(3, 4, device=device)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


MATRIX = boosted_configs(GEMINI_ON_DEVICE)


@pytest.mark.parametrize(("config", "given", "saved", "world"), MATRIX, ids=named(MATRIX))
def test_any_two_values_of_two_axes_are_right_together(
    tmp_path: Path,
    device: torch.device,
    device_ranks: Callable[[int], Ranks],
    config: RunConfig,
    given: dict[str, Any],
    saved: str,
    world: int,
) -> None:
    want = alone(config, world, device)
    for got in device_ranks(world).run(boosted, config, given, saved, tmp_path):
        assert all_equal(got, want)


def test_the_matrix_is_as_large_as_it_says() -> None:
    # A change of these numbers is a change of what is proved: make it on purpose.
    assert len(feasible_pairs(GEMINI_ON_DEVICE, every)) == 197
    assert len(MATRIX) == 10


def test_states_on_the_device_are_there_when_loaded(device: torch.device) -> None:
    """The count of steps too: the fused kernel wants it beside the weights."""
    _, optimizer = train(device, steps=1, precision="fp32", offload_optim_frac=0.5)
    before = {p: e["step"].device for p, e in optimizer.optim.state.items()}
    assert {d.type for d in before.values()} == {"cpu", device.type}
    saved = optimizer.state_dict()
    assert {v.device.type for e in saved["state"].values() for v in e.values()} == {"cpu"}
    optimizer.load_state_dict(saved)
    assert {p: e["step"].device for p, e in optimizer.optim.state.items()} == before
    optimizer.close()


def test_without_a_booster(device: torch.device, in_fp32: list[torch.Tensor]) -> None:
    model = GeminiDDP(model_of(), placement_policy="cpu", mixed_precision=torch.float32)
    optimizer = GeminiOptimizer(HybridAdam(model.parameters(), lr=1e-2), model)
    for step in range(3):
        optimizer.backward(model(batch(step, device)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert all_equal(list(model.state_dict(only_rank_0=False).values()), in_fp32)
    states = optimizer.state_dict()["state"]
    assert {v.device.type for entry in states.values() for v in entry.values()} == {"cpu"}
    optimizer.close()
    assert GeminiDDP(model_of()).mixed_precision == torch.float16


@pytest.mark.usefixtures("garbage_apart")
def test_the_accelerator_by_upstreams_calls(device: torch.device) -> None:
    here = get_accelerator()
    assert here.get_current_device() == device
    assert (here.name, here.current_device()) == (device.type, device.index)
    assert here.device_count() == torch.accelerator.device_count()
    here.set_device(device.index)
    kept = torch.zeros(1 << 20, device=device)
    here.synchronize()
    assert here.max_memory_allocated() >= here.memory_allocated() >= kept.nbytes
    here.empty_cache()
    here.reset_peak_memory_stats()
    assert here.max_memory_allocated() == here.memory_allocated()
