"""LowLevelZeroPlugin, TorchDDPPlugin and TorchFSDPPlugin, on one rank and on two."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

import tensorstow
from compare import all_equal
from ranks.boosted import batch, losses_on_all, model_of, report, samples, unsynced, whole
from ranks.pool import Ranks
from tensorstow.base.errors import OptionError
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import (
    GeminiPlugin,
    LowLevelZeroPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from tensorstow.planner.sizes import padded_bytes

Pool = Callable[[int], Ranks]
# ColossalAI 0.5.0, colossalai/booster/plugin/low_level_zero_plugin.py; None is its "fp16" there.
LOW_LEVEL: dict[str, Any] = {
    "stage": 1,
    "precision": None,
    "initial_scale": 2**32,
    "min_scale": 1,
    "growth_factor": 2,
    "backoff_factor": 0.5,
    "growth_interval": 1000,
    "hysteresis": 2,
    "max_scale": 2**32,
    "max_norm": 0.0,
    "norm_type": 2.0,
    "reduce_bucket_size_in_m": 12,
    "communication_dtype": None,
    "overlap_communication": True,
    "overlap_allgather": False,
    "cpu_offload": False,
    "master_weights": True,
    "verbose": False,
    "cast_inputs": True,
    "fp8_communication": False,
    "use_fp8": False,
    "extra_dp_size": 1,
}
DDP: dict[str, Any] = {
    "broadcast_buffers": True,
    "bucket_cap_mb": 25,
    "find_unused_parameters": False,
    "check_reduction": False,
    "gradient_as_bucket_view": False,
    "static_graph": False,
    "fp8_communication": False,
}
FSDP: dict[str, Any] = {
    "process_group": None,
    "sharding_strategy": None,
    "cpu_offload": None,
    "auto_wrap_policy": None,
    "backward_prefetch": None,
    "mixed_precision": None,
    "ignored_modules": None,
    "param_init_fn": None,
    "sync_module_states": False,
    "fp8_communication": False,
}


@pytest.mark.parametrize(
    ("plugin", "upstream"),
    [(LowLevelZeroPlugin, LOW_LEVEL), (TorchDDPPlugin, DDP), (TorchFSDPPlugin, FSDP)],
)
def test_signatures_are_upstreams(plugin: type[Plugin], upstream: dict[str, Any]) -> None:
    found = {p.name: p.default for p in inspect.signature(plugin).parameters.values()}
    assert found == upstream
    assert list(found) == list(upstream)


PLUGINS: list[tuple[type[Plugin], dict[str, Any]]] = [
    (GeminiPlugin, {}),
    (GeminiPlugin, {"shard_param_frac": 0.0}),
    (GeminiPlugin, {"shard_param_frac": 0.5}),
    (LowLevelZeroPlugin, {"stage": 1}),
    (LowLevelZeroPlugin, {"stage": 2, "cpu_offload": True}),
    (TorchDDPPlugin, {}),
    (TorchFSDPPlugin, {}),
    (TorchFSDPPlugin, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    (TorchFSDPPlugin, {"sharding_strategy": ShardingStrategy.NO_SHARD}),
    (TorchFSDPPlugin, {"cpu_offload": CPUOffload(offload_params=True)}),
]


@pytest.mark.parametrize(("plugin", "given"), PLUGINS, ids=str)
@pytest.mark.parametrize("world", [1, 2])
def test_every_plugin_trains_as_one_rank_does(
    ranks: Pool, world: int, plugin: type[Plugin], given: dict[str, Any]
) -> None:
    found = ranks(world).run(losses_on_all, plugin, given)
    plain = model_of()
    optimizer = HybridAdam(plain.parameters(), lr=1e-2)
    for step in range(3):
        losses = [plain(batch(step, rank)).square().mean() for rank in range(world)]
        torch.stack(losses).mean().backward()
        for rank, loss in enumerate(losses):
            assert found[rank][step] == pytest.approx(loss.item(), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("plugin", [GeminiPlugin, LowLevelZeroPlugin])
def test_two_copies(ranks: Pool, plugin: type[Plugin]) -> None:
    """``extra_dp_size`` is a mesh of two dimensions."""
    shapes = ranks(2).run(losses_on_all, plugin, {"extra_dp_size": 2}, True)  # noqa: FBT003
    assert shapes == [(2, 1), (2, 1)]


@pytest.mark.parametrize("plugin", [GeminiPlugin, LowLevelZeroPlugin])
@pytest.mark.parametrize("copies", [1, 2])
def test_the_report_says_what_padding_wastes(
    ranks: Pool, copies: int, plugin: type[Plugin]
) -> None:
    parameters = list(model_of().parameters())
    used = sum(p.nbytes for p in parameters)
    wasted = 0 if copies == 2 else 2 * sum(padded_bytes(p, 2) for p in parameters) - used
    assert wasted >= 0
    for line in ranks(2).run(report, plugin, {"extra_dp_size": copies}):
        assert f"used {used / 2**20:.2f} MiB, wasted {wasted / 2**20:.2f} MiB" in line
        assert f"({100 * wasted / (used + wasted):.2f}%)" in line


@pytest.mark.parametrize("plugin", [GeminiPlugin, TorchDDPPlugin])
def test_ranks_have_samples_of_their_own(ranks: Pool, plugin: type[Plugin]) -> None:
    first, second = ranks(2).run(samples, plugin)
    assert len(first) == len(second) == 5
    assert sorted(first + second) == list(range(10))


SCALES = {
    "initial_scale": 64.0,
    "growth_factor": 4,
    "backoff_factor": 0.25,
    "growth_interval": 2,
    "min_scale": 4,
    "max_scale": 200,
    "hysteresis": 1,
}


@pytest.mark.parametrize("plugin", [GeminiPlugin, LowLevelZeroPlugin])
def test_every_argument_of_the_loss_scale_is_honoured(plugin: type[Plugin]) -> None:
    booster = Booster(plugin=plugin(precision="fp16", **SCALES))
    model = model_of()
    model, optimizer, *_ = booster.boost(model, HybridAdam(model.parameters()))
    scales = []
    for overflows in (False, False, True, True, True, False, False):
        loss = model(batch(0, 0)).float().square().mean()
        booster.backward(loss * 2.0**120 if overflows else loss, optimizer)
        optimizer.step()
        # What a step that was skipped leaves is not added to.
        assert not overflows or all(p.grad is None for p in model.parameters())
        optimizer.zero_grad()
        scales.append(optimizer.loss_scale)
    assert scales == [64, 200, 50, 12.5, 4, 4, 16]
    optimizer.close()


@pytest.mark.parametrize("stage", [1, 2])
def test_low_level_zero_is_stage_two_with_what_it_is_told(stage: int) -> None:
    booster = Booster(plugin=LowLevelZeroPlugin(stage=stage, precision="bf16", max_norm=1e-3))
    model = model_of()
    given = HybridAdam(model.parameters(), nvme_offload_fraction=1.0)
    model, optimizer, *_ = booster.boost(model, given)
    plan = tensorstow.plan_of(model.unwrap())
    assert (plan.stage, plan.states) == (2, "disk")
    assert optimizer._memory().disk_bytes > 0
    assert booster.plugin.support_no_sync() == (stage == 1)
    out = model(batch(0, 0))
    assert out.dtype == torch.bfloat16
    booster.backward(out.float().square().mean(), optimizer)
    optimizer.step()
    assert optimizer.get_grad_norm() > 1e-3
    optimizer.close()
    plugin = LowLevelZeroPlugin(stage=stage, precision="bf16", master_weights=False)
    cast, *_ = Booster(plugin=plugin).boost(model_of())
    assert {p.dtype for p in cast.parameters()} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:`broadcast_buffers` is deprecated:FutureWarning")
def test_ddp_is_told_its_arguments() -> None:
    assert TorchDDPPlugin().support_no_sync()
    given = {
        "broadcast_buffers": False,
        "bucket_cap_mb": 3,
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
    }
    model, *_ = Booster(plugin=TorchDDPPlugin(**given)).boost(model_of())
    ddp = model.module
    assert not ddp.static_graph
    assert not ddp.broadcast_buffers
    assert ddp.bucket_bytes_cap == 3 << 20
    assert ddp.find_unused_parameters
    assert ddp.gradient_as_bucket_view
    model, *_ = Booster(plugin=TorchDDPPlugin(static_graph=True)).boost(model_of())
    assert model.module.static_graph
    with pytest.raises(OptionError, match=r"has no plan, .* where torch has them, on cpu"):
        tensorstow.plan_of(model)


@pytest.mark.parametrize(
    ("strategy", "stage"),
    [
        (None, 3),
        (ShardingStrategy.FULL_SHARD, 3),
        (ShardingStrategy.SHARD_GRAD_OP, 2),
        (ShardingStrategy.NO_SHARD, 0),
    ],
)
def test_strategies_of_fsdp_are_stages(strategy: ShardingStrategy | None, stage: int) -> None:
    model = model_of()
    given = HybridAdam(model.parameters(), nvme_offload_fraction=0.5)
    plugin = TorchFSDPPlugin(sharding_strategy=strategy)
    model, optimizer, *_ = Booster(plugin=plugin).boost(model, given)
    assert tensorstow.plan_of(model.unwrap()).stage == stage
    numel = sum(p.numel() for p in model.parameters())
    assert optimizer._memory().disk_bytes == 8 * round(0.5 * numel)
    optimizer.close()


@pytest.mark.parametrize(
    ("plugin", "given"), [(LowLevelZeroPlugin, {"stage": 1}), (TorchDDPPlugin, {})], ids=str
)
def test_no_sync_reduces_nothing(ranks: Pool, plugin: type[Plugin], given: dict[str, Any]) -> None:
    """A rank has its own gradients."""
    for rank, found in enumerate(ranks(2).run(unsynced, plugin, given)):
        own = model_of()
        own(batch(0, rank)).square().mean().backward()
        for ours, p in zip(found, own.parameters(), strict=True):
            assert torch.equal(ours, p.grad)


@pytest.mark.parametrize(
    ("plugin", "given"), [(LowLevelZeroPlugin, {"stage": 1}), (TorchDDPPlugin, {})], ids=str
)
@pytest.mark.parametrize("world", [1, 2])
def test_no_sync_leaves_out_reductions_and_loses_nothing(
    ranks: Pool, world: int, plugin: type[Plugin], given: dict[str, Any]
) -> None:
    with_it = ranks(world).run(losses_on_all, plugin, given, False, True)  # noqa: FBT003
    without = ranks(world).run(losses_on_all, plugin, given, False, False, 2)  # noqa: FBT003
    for a, b in zip(with_it, without, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


@pytest.mark.parametrize(
    ("plugin", "given", "said"),
    [
        (LowLevelZeroPlugin, {"stage": 3}, "stage=3 was given"),
        (LowLevelZeroPlugin, {"extra_dp_size": 0}, "extra_dp_size=0 was given"),
        (
            LowLevelZeroPlugin,
            {"precision": "bf16", "communication_dtype": torch.float32},
            "communication_dtype",
        ),
        (
            TorchFSDPPlugin,
            {"sharding_strategy": ShardingStrategy.HYBRID_SHARD},
            "sharding_strategy",
        ),
        (
            TorchFSDPPlugin,
            {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)},
            "mixed_precision",
        ),
    ],
)
def test_what_cannot_be_honoured_is_refused(
    plugin: type[Plugin], given: dict[str, Any], said: str
) -> None:
    with pytest.raises(OptionError, match=said):
        plugin(**given)


def test_stage_two_does_not_leave_out_reductions() -> None:
    booster = Booster(plugin=LowLevelZeroPlugin(stage=2))
    model, optimizer, *_ = booster.boost(model_of())
    with pytest.raises(OptionError, match=r"no_sync\(\) was called with LowLevelZeroPlugin"):
        booster.no_sync(model, optimizer)


def test_fsdp_computes_in_the_dtype_it_is_told() -> None:
    plugin = TorchFSDPPlugin(mixed_precision=MixedPrecision(torch.bfloat16))
    model, *_ = Booster(plugin=plugin).boost(model_of())
    assert model(batch(0, 0)).dtype == torch.bfloat16
    model, *_ = Booster(plugin=TorchFSDPPlugin()).boost(model_of().bfloat16())
    assert model(batch(0, 0).bfloat16()).dtype == torch.bfloat16


def test_fsdp_initializes_a_model_on_the_meta_device() -> None:
    def ones(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    with torch.device("meta"):
        empty = model_of()
    model, *_ = Booster(plugin=TorchFSDPPlugin(param_init_fn=ones)).boost(empty)
    assert all_equal(whole(model), [torch.ones_like(p) for p in model_of().parameters()])


def test_ddp_keeps_the_optimizer_that_it_was_given() -> None:
    model = model_of()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = Booster(plugin=TorchDDPPlugin()).boost(model, given)
    assert optimizer.unwrap() is given
    assert boosted.unwrap() is model
    assert isinstance(boosted.module, DistributedDataParallel)


NAMES = [
    (GeminiPlugin, ""),
    (LowLevelZeroPlugin, "module."),
    (TorchFSDPPlugin, "module."),
    (TorchDDPPlugin, "module.module."),
]


@pytest.mark.parametrize(("plugin", "before"), NAMES)
def test_names_of_weights_are_upstreams(plugin: type[Plugin], before: str) -> None:
    boosted, *_ = Booster(plugin=plugin()).boost(model_of())
    expected = [f"{before}{name}" for name, _ in model_of().named_parameters()]
    assert [name for name, _ in boosted.named_parameters()] == expected
    assert list(boosted.state_dict()) == expected
    other = {
        n: torch.full_like(p, 0.5) for n, p in zip(expected, model_of().parameters(), strict=True)
    }
    boosted.load_state_dict(other)
    assert all_equal(whole(boosted), list(other.values()))


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_gradients_of_torchs_optimizers_are_clipped_by_torch(norm_type: float) -> None:
    model, plain = model_of(), model_of()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    boosted, optimizer, *_ = Booster(plugin=TorchDDPPlugin()).boost(model, given)
    optimizer.backward(boosted(batch(0, 0)).square().sum())
    plain(batch(0, 0)).square().sum().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
    assert torch.equal(optimizer.clip_grad_by_norm(0.5, norm_type), norm)
    nn.utils.clip_grad_value_(plain.parameters(), 1e-3)
    optimizer.clip_grad_by_value(1e-3)
    assert all_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
