"""Names of upstream's that scripts use beside the engine."""

import logging
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

import tensorstow.deepspeed as deepspeed
from tensorstow.base.errors import AbsentAttributeError, AbsentError, OptionError
from tensorstow.deepspeed import comm
from tensorstow.deepspeed.compression.helper import recursive_getattr, recursive_setattr
from tensorstow.deepspeed.moe.utils import (
    has_moe_layers,
    split_params_into_different_moe_groups_for_optimizer,
    split_params_into_shared_and_expert_params,
)
from tensorstow.deepspeed.runtime import lr_schedules
from tensorstow.deepspeed.runtime.engine import DeepSpeedEngine
from tensorstow.deepspeed.runtime.utils import see_memory_usage
from tensorstow.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from tensorstow.deepspeed.utils import groups, set_log_level_from_string


def test_comm_is_torch_distributed_and_one_rank_needs_no_group() -> None:
    assert comm.all_reduce is dist.all_reduce
    assert comm.ReduceOp is dist.ReduceOp
    assert comm.init_distributed is deepspeed.init_distributed
    assert not hasattr(comm, "no_such_name")
    if not dist.is_initialized():
        assert (comm.get_rank(), comm.get_world_size()) == (0, 1)
        assert groups.get_data_parallel_group() is None
        assert (groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()) == (0, 1)


def test_every_schedule_of_a_configuration_is_a_class() -> None:
    assert len(lr_schedules.VALID_LR_SCHEDULES) == 5
    for name in lr_schedules.VALID_LR_SCHEDULES:
        assert issubclass(getattr(lr_schedules, name), lr_schedules.LRSchedule)


def test_parts_of_a_model_are_read_and_replaced_by_path() -> None:
    model = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.ReLU()))
    assert recursive_getattr(model, "0.1") is model[0][1]
    recursive_setattr(model, "0.1", torch.nn.Tanh())
    assert isinstance(model[0][1], torch.nn.Tanh)


def test_experts_are_refused_where_a_script_makes_them() -> None:
    with pytest.raises(AbsentAttributeError, match="experts are plain modules"):
        deepspeed.moe.layer.MoE  # noqa: B018


def test_devices_are_the_texts_of_a_configuration() -> None:
    assert "optim_states" in [*OffloadStateTypeEnum]
    assert [*OffloadDeviceEnum] == ["none", "cpu", "nvme"]
    assert DeepSpeedEngine is deepspeed.DeepSpeedEngine


def test_scripts_write_to_the_log_of_this_package(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="tensorstow"):
        deepspeed.log_dist("here", ranks=[0])
        deepspeed.log_dist("elsewhere", ranks=[1])
        see_memory_usage("not asked")
        see_memory_usage("behind the step", force=True)
    first, second = (record.message for record in caplog.records)
    assert first == "[Rank 0] here"
    assert second.startswith("behind the step: 0 B on the device")
    assert deepspeed.logger.name == "tensorstow"


def test_a_level_is_set_by_its_name() -> None:
    log, handler = logging.getLogger("a log of this test"), logging.NullHandler()
    log.addHandler(handler)
    set_log_level_from_string("Error", log)
    assert log.level == handler.level == logging.ERROR
    with pytest.raises(OptionError, match="'loud' was given: it is one of debug, info"):
        set_log_level_from_string("loud", log)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("", "PipelineModule"),
        ("pipe", "PipelineModule"),
        ("compression", "init_compression"),
        ("compression.compress", "init_compression"),
        ("moe.layer", "MoE"),
        ("runtime.config_utils", "DeepSpeedConfigModel"),
        ("runtime.precision_config", "DeepSpeedFP16Config"),
        ("runtime.zero.config", "DeepSpeedZeroConfig"),
        ("ops.sparse_attention", "SparseSelfAttention"),
        ("ops.transformer", "DeepSpeedTransformerLayer"),
        ("", "tp_model_init"),
        ("", "add_tuning_arguments"),
        ("", "profiling"),
        ("autotuning", "Autotuner"),
        ("elasticity", "compute_elastic_config"),
        ("inference", "InferenceEngine"),
        ("launcher", "runner"),
        ("linear", "OptimizedLinear"),
        ("module_inject", "replace_module"),
        ("profiling", "FlopsProfiler"),
        ("sequence", "DistributedAttention"),
        ("ops", "lamb"),
        ("ops.lamb", "FusedLamb"),
    ],
)
def test_what_is_not_here_is_refused_with_advice(module: str, name: str) -> None:
    place = import_module(f"tensorstow.deepspeed.{module}".rstrip("."))
    told = f"{name} is not in tensorstow.deepspeed"
    with pytest.raises(AbsentAttributeError, match=told):
        getattr(place, name)
    with pytest.raises(AbsentError, match=told):
        exec(f"from {place.__name__} import {name}")  # noqa: S102
    assert not hasattr(place, "__no_such__")


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("autotuning.autotuner", "plan="),
        ("elasticity.config", "torchrun"),
        ("inference.v2.engine_v2", "weights=folder"),
        ("launcher.runner", "torchrun"),
        ("linear.config", "peft"),
        ("module_inject.layers", "weights=folder"),
        ("profiling.flops_profiler.profiler", "FlopCounterMode"),
        ("sequence.layer", "offload_activations"),
        ("ops.lamb.fused_lamb", "StowedOptimizer"),
    ],
)
def test_a_module_that_is_not_here_is_refused_with_advice(module: str, said: str) -> None:
    for line in (f"import {{}}.{module}", f"from {{}}.{module} import Name"):
        with pytest.raises(AbsentError, match=said):
            exec(line.format("tensorstow.deepspeed"))  # noqa: S102


def test_a_script_for_experts_runs_without_any() -> None:
    model = torch.nn.Linear(2, 2)
    given = {"params": (p for p in model.parameters()), "name": "all"}
    (group,) = split_params_into_different_moe_groups_for_optimizer(given)
    assert (group["name"], group["params"]) == ("all", list(model.parameters()))
    assert has_moe_layers(model) == (False, 0)
    model.bias.allreduce = False
    shared, own = split_params_into_shared_and_expert_params(model.parameters())
    assert shared[0] is model.weight
    assert own[0] is model.bias
    with pytest.raises(OptionError, match="whose allreduce is False"):
        split_params_into_different_moe_groups_for_optimizer({"params": model.parameters()})


def test_a_configuration_is_an_object() -> None:
    adam = {"type": "Adam", "params": {"lr": 1.0}}
    written = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": adam}
    zero = {"stage": 3, "offload_param": {"device": "cpu"}}
    found = deepspeed.DeepSpeedConfig({**written, "zero_optimization": zero})
    assert found.train_micro_batch_size_per_gpu * found.world_size == 2
    assert (found.optimizer_name, found.optimizer_params) == ("Adam", {"lr": 1.0})
    assert (found.scheduler_name, found.zero_enabled, found.bfloat16_enabled) == (None, True, False)
    assert found.zero_config.offload_param.device == "cpu"
    assert found.gradient_allreduce_op == "mean"
    summed = {**written, "gradient_allreduce_op": "SUM"}
    assert deepspeed.DeepSpeedConfig(summed).gradient_allreduce_op == "sum"
    assert deepspeed.__git_hash__ == deepspeed.__git_branch__ == "[none]"
    with pytest.raises(deepspeed.DeepSpeedConfigError):
        deepspeed.DeepSpeedConfig({})
