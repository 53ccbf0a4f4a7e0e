"""LowLevelZeroPlugin, TorchDDPPlugin and TorchFSDPPlugin, on one rank and on two."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy

from compare import all_equal
from ranks.boosted import batch, losses_on_all, model_of, whole
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


def test_two_copies_of_gemini(ranks: Pool) -> None:
    """``extra_dp_size`` is a mesh of two dimensions."""
    shapes = ranks(2).run(losses_on_all, GeminiPlugin, {"extra_dp_size": 2}, True)  # noqa: FBT003
    assert shapes == [(2, 1), (2, 1)]


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
        (LowLevelZeroPlugin, {"norm_type": 1.0}, "norm_type"),
        (LowLevelZeroPlugin, {"use_fp8": True}, "use_fp8"),
        (LowLevelZeroPlugin, {"fp8_communication": True}, "fp8_communication"),
        (LowLevelZeroPlugin, {"cast_inputs": False}, "cast_inputs"),
        (
            LowLevelZeroPlugin,
            {"precision": "bf16", "communication_dtype": torch.float32},
            "communication_dtype",
        ),
        (TorchDDPPlugin, {"check_reduction": True}, "check_reduction"),
        (TorchDDPPlugin, {"fp8_communication": True}, "fp8_communication"),
        (TorchFSDPPlugin, {"auto_wrap_policy": model_of}, "auto_wrap_policy"),
        (TorchFSDPPlugin, {"ignored_modules": [nn.Linear(1, 1)]}, "ignored_modules"),
        (TorchFSDPPlugin, {"fp8_communication": True}, "fp8_communication"),
        (TorchFSDPPlugin, {"process_group": object()}, "process_group"),
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
    assert [n for n, _ in boosted.named_parameters()] == [n for n, _ in model.named_parameters()]
