import inspect
import logging
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tensorstow
from compare import all_equal
from ranks.boosted import batch, model_of
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin

# ColossalAI 0.5.0, colossalai/booster/plugin/gemini_plugin.py
UPSTREAM: dict[str, Any] = {
    "chunk_config_dict": None,
    "chunk_init_device": None,
    "placement_policy": "static",
    "enable_gradient_accumulation": False,
    "max_prefetch": 0,
    "shard_param_frac": 1.0,
    "offload_optim_frac": 0.0,
    "offload_param_frac": 0.0,
    "warmup_non_model_data_ratio": 0.8,
    "steady_cuda_cap_ratio": 0.9,
    "precision": "fp16",
    "master_weights": True,
    "pin_memory": False,
    "force_outputs_fp32": False,
    "strict_ddp_mode": False,
    "search_range_m": 32,
    "hidden_dim": None,
    "min_chunk_size_m": 32,
    "memstats": None,
    "gpu_margin_mem_ratio": 0.0,
    "initial_scale": 2**16,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
    "max_norm": 0.0,
    "norm_type": 2.0,
    "tp_size": 1,
    "extra_dp_size": 1,
    "enable_all_optimization": False,
    "enable_fused_normalization": False,
    "enable_flash_attention": False,
    "enable_sequence_parallelism": False,
    "enable_jit_fused": False,
    "enable_async_reduce": True,
    "use_fp8": False,
    "verbose": False,
    "fp8_communication": False,
}


def trained(plugin: GeminiPlugin, factor: float = 1.0, steps: int = 3) -> tuple[Any, Any]:
    """Return a model and its optimizer after some steps with losses times ``factor``."""
    booster = Booster(plugin=plugin)
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters(), lr=1e-2))
    for step in range(steps):
        booster.backward(model(batch(step)).float().square().mean() * factor, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_the_signature_is_upstreams() -> None:
    parameters = list(inspect.signature(GeminiPlugin).parameters.values())
    found = {p.name: p.default for p in parameters}
    assert list(found) == [*UPSTREAM, "device"]
    # What upstream has on its accelerators; there is no CPU that it computes on.
    assert {**found, "precision": "fp16"} == {**UPSTREAM, "device": None}
    assert found["precision"] is None


@pytest.mark.parametrize("policy", ["static", "cuda", "cpu", "const", "auto"])
def test_every_policy_computes_the_same(policy: str) -> None:
    plain = model_of()
    optimizer = HybridAdam(plain.parameters(), lr=1e-2)
    for step in range(3):
        plain(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model, _ = trained(GeminiPlugin(placement_policy=policy))
    assert all_equal(list(model.parameters()), list(plain.parameters()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"placement_policy": "gpu"}, "placement_policy='gpu' was given: it must be one of"),
        ({"placement_policy": "cpu", "offload_param_frac": 0.5}, "which has its own"),
        ({"offload_param_frac": 1.5}, r"offload_param_frac=1\.5 was given"),
        ({"offload_param_frac": 0.5}, "Set offload_optim_frac at least as high"),
        ({"offload_optim_frac": True}, "offload_optim_frac=True was given"),
        ({"warmup_non_model_data_ratio": 1.5}, r"warmup_non_model_data_ratio=1\.5 was given"),
        ({"steady_cuda_cap_ratio": -0.1}, r"steady_cuda_cap_ratio=-0\.1 was given"),
        ({"precision": "fp64"}, "precision='fp64' was given"),
        ({"max_norm": -1.0}, r"max_norm=-1\.0 was given"),
        ({"max_norm": float("nan")}, "max_norm=nan was given"),
        ({"initial_scale": 0}, "initial_scale=0 was given"),
        ({"growth_factor": 1}, "growth_factor=1 was given"),
        ({"backoff_factor": 1}, "backoff_factor=1 was given"),
        ({"growth_interval": 0}, "growth_interval=0 was given"),
        ({"growth_interval": 1.5}, r"growth_interval=1\.5 was given"),
        ({"max_prefetch": -1}, "max_prefetch=-1 was given"),
        ({"hysteresis": -1}, "hysteresis=-1 was given"),
        ({"device": "meta"}, "device='meta' was given"),
        ({"device": 0}, "device=0 was given"),
        ({"device": "nowhere"}, "device='nowhere' was given"),
        ({"extra_dp_size": 0}, "extra_dp_size=0 was given"),
    ],
)
def test_what_cannot_be_honoured_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        GeminiPlugin(**given)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"extra_dp_size": 2}, "replicas=2 was given"),
        (
            {"extra_dp_size": 2, "precision": "bf16", "master_weights": False},
            "replicas=2 was given",
        ),
    ],
    ids=str,
)
def test_what_a_model_shows_is_refused_before_it_changes(given: dict[str, Any], said: str) -> None:
    model = model_of()
    optimizer = HybridAdam(model.parameters())
    with pytest.raises(OptionError, match=said):
        Booster(plugin=GeminiPlugin(**given)).boost(model, optimizer)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    model(batch(0)).sum().backward()
    optimizer.step()  # it was not closed either
    optimizer.close()


class Several(nn.Module):
    """Returns containers, and whole numbers among others."""

    def __init__(self, inner: nn.Module) -> None:
        """Wrap ``inner``."""
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        """Return outputs and their largest places."""
        out = self.inner(x)
        return {"out": out, "more": (out + 1, out.argmax(-1))}


def whole(tensor: Any) -> torch.Tensor:  # noqa: ANN401
    """Return a copy of a tensor, or of the whole of a sharded one."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


@pytest.mark.parametrize("max_norm", [0.01, 0.1, 100.0])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_are_clipped_in_every_precision(precision: str, max_norm: float) -> None:
    booster = Booster(plugin=GeminiPlugin(precision=precision, max_norm=max_norm, initial_scale=64))
    model = model_of()
    # With this eps a step is nearly lr / eps times the gradient: it shows a clip that is lost.
    model, optimizer, *_ = booster.boost(model, torch.optim.Adam(model.parameters(), eps=1e-2))
    booster.backward(model(batch(0)).float().square().mean(), optimizer)
    scale = 64 if precision == "fp16" else 1
    gradients = [whole(p.grad).float() / scale for p in model.parameters()]
    norm = torch.stack([g.double().square().sum() for g in gradients]).sum().sqrt()
    same = [nn.Parameter(whole(p)) for p in model.parameters()]
    optimizer.step()
    for p, g in zip(same, gradients, strict=True):
        p.grad = g * min(1.0, max_norm / (float(norm) + 1e-6))
    torch.optim.Adam(same, eps=1e-2).step()
    for p, q in zip(model.parameters(), same, strict=True):
        torch.testing.assert_close(whole(p), q.detach(), rtol=1e-5, atol=1e-7)
    assert optimizer.get_grad_norm() == pytest.approx(float(norm), rel=1e-6)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_computes_in_it_and_keeps_fp32_weights(precision: str) -> None:
    seen: list[torch.dtype] = []
    booster = Booster(plugin=GeminiPlugin(precision=precision, initial_scale=8))
    model = model_of()
    model[0].register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters()))
    out = model(batch(0))
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert out.dtype == seen[0] == half
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    booster.backward(out.float().sum(), optimizer)
    optimizer.step()


def test_what_is_asked_is_in_the_plan() -> None:
    for prefetch, shard, stage, unsharded in ((3, 0.5, 3, 2), (0, 0.0, 2, 0)):
        plugin = GeminiPlugin(max_prefetch=prefetch, shard_param_frac=shard)
        model, *_ = Booster(plugin=plugin).boost(model_of())
        plan = tensorstow.plan_of(model.unwrap())
        assert (plan.prefetch, plan.stage, len(plan.unsharded)) == (prefetch, stage, unsharded)


@pytest.mark.parametrize("verbose", [False, True])
def test_the_report_is_seen_where_that_is_asked(
    verbose: bool,  # noqa: FBT001
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    Booster(plugin=GeminiPlugin(verbose=verbose)).boost(model_of())
    (record,) = [r for r in caplog.records if r.getMessage().startswith("placing ")]
    assert record.levelno == (logging.WARNING if verbose else logging.INFO)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_without_master_weights_a_model_is_cast_for_good(precision: str) -> None:
    plugin = GeminiPlugin(precision=precision, master_weights=False, initial_scale=64)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    runs = []
    for model in (model_of(), model_of().to(dtype)):
        given = HybridAdam(model.parameters(), lr=1e-2)
        boosted, optimizer, *_ = Booster(plugin=plugin).boost(model, given)
        for step in range(3):
            out = boosted(batch(step))  # what goes in is cast too
            assert out.dtype == dtype
            optimizer.backward(out.float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        assert {p.dtype for p in boosted.parameters()} == {dtype}
        runs.append(list(map(whole, boosted.parameters())))
        optimizer.close()
    assert all_equal(*runs)
    assert not all_equal(runs[0], model_of().to(dtype).parameters())


def test_outputs_are_fp32_where_that_is_asked() -> None:
    plugin = GeminiPlugin(precision="bf16", force_outputs_fp32=True)
    model, *_ = Booster(plugin=plugin).boost(Several(model_of()))
    found = model(batch(0))
    assert [each.dtype for each in (found["out"], *found["more"])] == [
        torch.float32,
        torch.float32,
        torch.int64,
    ]


def test_a_step_that_overflows_is_skipped_and_the_scale_falls() -> None:
    plugin = GeminiPlugin(precision="fp16", initial_scale=2**16, hysteresis=1)
    model, optimizer = trained(plugin, factor=2.0**120, steps=2)
    assert optimizer.loss_scale == 2**14
    unchanged = model_of().parameters()
    for p, q in zip(model.parameters(), unchanged, strict=True):
        assert torch.equal(p.full_tensor(), q)


def test_fp16_needs_the_boosters_backward() -> None:
    booster = Booster(plugin=GeminiPlugin(precision="fp16"))
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters()))
    model(batch(0)).float().mean().backward()
    with pytest.raises(OptionError, match=r"without Booster\.backward"):
        optimizer.step()
    optimizer.zero_grad()
    booster.backward(model(batch(0)).float().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    model(batch(1)).float().mean().backward()  # a step with it says nothing of the next
    with pytest.raises(OptionError, match=r"without Booster\.backward"):
        optimizer.step()


def test_gradients_of_fp16_are_multiplied_by_the_loss_scale() -> None:
    found = []
    for scale in (1.0, 256.0):
        booster = Booster(plugin=GeminiPlugin(precision="fp16", initial_scale=scale))
        model = model_of()
        model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters()))
        booster.backward(model(batch(0)).float().square().mean(), optimizer)
        found.append([whole(p.grad).float() / scale for p in model.parameters()])
        optimizer.step()
        assert optimizer.get_grad_norm() == pytest.approx(
            float(torch.stack([g.double().square().sum() for g in found[-1]]).sum().sqrt())
        )
    assert any(g.any() for g in found[0])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-5)


def test_frozen_parameters_are_placed_and_not_trained() -> None:
    model = model_of()
    model[0].requires_grad_(False)  # noqa: FBT003
    booster = Booster(plugin=GeminiPlugin(placement_policy="cpu", precision="bf16"))
    given = HybridAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    model, optimizer, *_ = booster.boost(model, given)
    booster.backward(model(batch(0)).float().sum(), optimizer)
    optimizer.step()
    now = dict(model.named_parameters())
    before = dict(model_of().named_parameters())
    changed = {n for n, p in before.items() if not torch.equal(now[n].full_tensor(), p)}
    assert changed == {n for n in before if not n.startswith("0.")}
    assert type(now["0.0.weight"].to_local()).__name__ == "StowedParameter"


def test_a_dataloader_gives_every_sample_once() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = GeminiPlugin().prepare_dataloader(data, batch_size=4, shuffle=True)
    assert sorted(x for (b,) in loader for x in b.tolist()) == list(range(10))


def test_every_worker_of_a_dataloader_draws_from_the_seed() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = GeminiPlugin().prepare_dataloader(data, batch_size=4, seed=7)
    begin: Any = loader.worker_init_fn
    kept = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        found = []
        for worker in (0, 1):
            begin(worker)
            found.append((torch.rand(()).item(), np.random.rand(), random.random()))  # noqa: NPY002, S311
    finally:
        torch.set_rng_state(kept[0])
        np.random.set_state(kept[1])  # noqa: NPY002
        random.setstate(kept[2])
    first = torch.rand((), generator=torch.Generator().manual_seed(7)).item()
    drawn = np.random.RandomState(7).rand(), random.Random(7).random()  # noqa: S311
    assert found == 2 * [(first, *drawn)]
