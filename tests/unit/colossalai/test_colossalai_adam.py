import inspect
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compare import all_equal
from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.base.errors import OptionError
from tensorstow.colossalai import CPUAdam, HybridAdam
from tensorstow.colossalai.adam import ParamsInHostMemory

SMALL = PipelinePolicy(chunk_elements=4096)


def weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(n)) for n in (3000, 50, 7000)]


def give_gradients(params: list[nn.Parameter], seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator) * scale


@pytest.mark.parametrize("cls", [CPUAdam, HybridAdam])
def test_signature_is_upstreams(cls: type[CPUAdam]) -> None:
    positional = [
        "model_params",
        "lr",
        "bias_correction",
        "betas",
        "eps",
        "weight_decay",
        "adamw_mode",
        "nvme_offload_fraction",
        "nvme_offload_dir",
    ]
    parameters = inspect.signature(cls).parameters
    assert list(parameters)[: len(positional)] == positional
    defaults = [parameters[name].default for name in positional[1:]]
    assert defaults == [1e-3, True, (0.9, 0.999), 1e-8, 0, True, 0.0, None]
    assert parameters["amsgrad"].default is False
    assert parameters["simd_log"].default is False
    assert list(inspect.signature(cls.step).parameters) == ["self", "closure", "div_scale"]


@pytest.mark.parametrize("cls", [CPUAdam, HybridAdam])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_equals_adamw_wherever_states_are(
    tmp_path: Path, cls: type[CPUAdam], fraction: float
) -> None:
    a, b = weights(), weights()
    ours = cls(a, nvme_offload_fraction=fraction, nvme_offload_dir=str(tmp_path), policy=SMALL)
    plain = AdamW(b, weight_decay=0.0)
    for step in range(3):
        give_gradients(a, step)
        give_gradients(b, step)
        ours.step()
        plain.step()
    assert all_equal(a, b)
    assert ours._memory().disk_bytes == 8 * round(fraction * 10_050)


def test_adamw_mode_off_is_an_l2_penalty() -> None:
    a, b = weights(), weights()
    ours = HybridAdam(a, weight_decay=0.1, adamw_mode=False)
    theirs = torch.optim.Adam(b, weight_decay=0.1)
    for step in range(3):
        give_gradients(a, step)
        give_gradients(b, step)
        ours.step()
        theirs.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_bias_correction_off_takes_the_raw_moments() -> None:
    (weight,) = [nn.Parameter(torch.zeros(1))]
    opt = CPUAdam([weight], lr=1.0, bias_correction=False, eps=0.0)
    weight.grad = torch.ones(1)
    opt.step()
    assert weight.item() == pytest.approx(-0.1 / 0.001**0.5, rel=1e-6)


def test_div_scale_divides_gradients() -> None:
    a, b = weights(), weights()
    scaled, plain = HybridAdam(a), HybridAdam(b)
    give_gradients(a, 1, scale=64.0)
    give_gradients(b, 1)
    scaled.step(div_scale=64.0)
    plain.step()
    assert all_equal(a, b)


def test_closure_comes_back() -> None:
    a = weights()
    give_gradients(a, 1)
    assert HybridAdam(a).step(lambda: 3.5) == 3.5


def test_an_unknown_keyword_is_an_error_not_silence() -> None:
    with pytest.raises(TypeError, match="fused_adam"):
        HybridAdam(weights(), fused_adam=True)  # type: ignore[call-arg]


@pytest.mark.parametrize("fraction", [-0.1, 1.01])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(OptionError, match="between 0 and 1"):
        HybridAdam(weights(), nvme_offload_fraction=fraction)


def test_simd_log_says_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tensorstow"):
        HybridAdam(weights(), simd_log=True, policy=PipelinePolicy(isa="scalar"))
    assert "scalar" in caplog.text
    assert "threads" in caplog.text


class OfOtherSizes(ParamsInHostMemory):
    def manages(self, parameter: torch.Tensor) -> bool:
        return parameter.numel() != 50


class FakeAccelerator(HybridAdam):
    """Treats the parameters marked so as an accelerator's: torch's fused Adam steps them."""

    def _make_param_filter(self) -> ParamsInHostMemory:
        return OfOtherSizes()


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("adamw_mode", [False, True])
def test_mixed_sets_go_through_both(tmp_path: Path, *, amsgrad: bool, adamw_mode: bool) -> None:
    a, b = weights(), weights()
    mixed = FakeAccelerator(
        a,
        weight_decay=0.1,
        amsgrad=amsgrad,
        adamw_mode=adamw_mode,
        nvme_offload_fraction=1.0,
        nvme_offload_dir=tmp_path,
    )
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    theirs = kind([b[1]], weight_decay=0.1, amsgrad=amsgrad, fused=True)
    rest = CPUAdam([b[0], b[2]], weight_decay=0.1, amsgrad=amsgrad, adamw_mode=adamw_mode)
    for step in range(3):
        give_gradients(a, step, scale=8.0)
        give_gradients(b, step)
        mixed.step(div_scale=8.0)
        theirs.step()
        rest.step()
    assert all_equal(a, b)
    assert mixed._memory().logical_bytes == (12 if amsgrad else 8) * 10_000


def test_mixed_sets_clip_and_scale_both_alike() -> None:
    a, b = weights(), weights()
    mixed, kernel = FakeAccelerator(a), HybridAdam(b)
    give_gradients(a, 1)
    give_gradients(b, 1)
    assert mixed.clip_grad_norm_(0.5) == kernel.clip_grad_norm_(0.5)
    mixed.step()
    kernel.step()
    for p, q in zip(a, b, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_mixed_sets_save_and_load(tmp_path: Path) -> None:
    a = weights()
    first = FakeAccelerator(a, nvme_offload_fraction=1.0, nvme_offload_dir=tmp_path)
    give_gradients(a, 1)
    first.step()
    saved = first.state_dict()
    assert [set(entry) for entry in saved["state"].values()] == [
        {"step", "exp_avg", "exp_avg_sq"}
    ] * 3
    second = FakeAccelerator(a, nvme_offload_fraction=0.5, nvme_offload_dir=tmp_path)
    second.load_state_dict(saved)
    restored = second.state_dict()
    for index, entry in saved["state"].items():
        for name, tensor in entry.items():
            assert torch.equal(tensor, restored["state"][index][name])


def test_fused_adam_cannot_leave_bias_correction_out() -> None:
    a = weights()
    opt = FakeAccelerator(a, bias_correction=False)
    give_gradients(a, 1)
    with pytest.raises(OptionError, match="bias_correction"):
        opt.step()


@pytest.mark.parametrize("cls", [CPUAdam, HybridAdam])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"nvme_offload_fraction": 1.5}, r"nvme_offload_fraction=1.5 was given"),
        ({"nvme_offload_fraction": "disk"}, r"nvme_offload_fraction='disk' was given"),
        ({"nvme_offload_fraction": True}, r"nvme_offload_fraction=True was given"),
        ({"nvme_offload_fraction": 1.0, "nvme_offload_dir": ""}, 'nvme_offload_dir="" was given'),
        ({"nvme_offload_fraction": 1.0, "nvme_offload_dir": []}, "nvme_offload_dir= is an empty"),
    ],
)
def test_errors_name_what_was_typed(cls: type[CPUAdam], given: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        cls(weights(), **given)


@pytest.mark.parametrize("cls", [CPUAdam, HybridAdam])
def test_the_directory_is_made_where_states_go_there(
    cls: type[CPUAdam], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cls(weights(), nvme_offload_dir="./offload")
    assert not Path("offload").exists()
    optimizer = cls(weights(), nvme_offload_fraction=1.0, nvme_offload_dir="./offload")
    assert optimizer._memory().disk_bytes > 0
    assert Path("offload").is_dir()


def small_model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def losses_of(optimizer: Callable[..., Any], **keywords: object) -> tuple[list[float], int]:
    model, made = stow(small_model(), optimizer, **keywords)
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    on_disk = made._memory().disk_bytes
    made.close()
    return losses, on_disk


@pytest.mark.parametrize("cls", [CPUAdam, HybridAdam])
@pytest.mark.parametrize(
    ("fraction", "plan"),
    [
        (0.0, "auto"),
        (0.0, Plan(states="disk")),
        (0.0, Plan(overlap="backward")),
        (1.0, "auto"),
        (0.5, "auto"),
        (0.5, Plan(parameters="disk", states="disk")),
    ],
    ids=str,
)
def test_places_a_whole_model(cls: type[CPUAdam], fraction: float, plan: Plan | str) -> None:
    plain, _ = losses_of(partial(AdamW, lr=1e-2, weight_decay=0.0))
    made = partial(cls, lr=1e-2, nvme_offload_fraction=fraction)
    losses, on_disk = losses_of(made, plan=plan)
    assert losses == plain
    numel = sum(p.numel() for p in small_model().parameters())
    share = fraction or float(isinstance(plan, Plan) and plan.states == "disk")
    assert on_disk == 8 * round(share * numel)


def test_a_whole_model_commits_and_resumes(tmp_path: Path) -> None:
    model, made = stow(small_model(), partial(HybridAdam, lr=1e-2), dir=tmp_path)
    with made:
        model(torch.ones(1, 16)).sum().backward()
        made.step()
    after = [p.detach().clone() for p in model.parameters()]
    again, resumed = stow(small_model(), partial(HybridAdam, lr=1e-2), dir=tmp_path)
    with resumed:
        assert resumed.resume() == 1
        assert all_equal(list(again.parameters()), after)


def test_fraction_and_plan_may_not_contradict_each_other() -> None:
    made = partial(HybridAdam, lr=1e-2, nvme_offload_fraction=0.5)
    said = r"nvme_offload_fraction=0\.5 was given.*, which means states='disk',.* in one place"
    with pytest.raises(OptionError, match=said):
        stow(small_model(), made, plan=Plan(states="host"))
    with pytest.raises(OptionError, match=r"nvme_offload_fraction=0\.5 was given with states"):
        HybridAdam(weights(), nvme_offload_fraction=0.5, states="host")


def test_a_run_has_one_directory(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="Leave nvme_offload_dir out"):
        HybridAdam(weights(), nvme_offload_dir=tmp_path, dir=tmp_path)
