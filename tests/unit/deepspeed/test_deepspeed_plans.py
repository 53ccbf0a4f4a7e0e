"""From a DeepSpeed configuration to a plan."""

import pytest
import torch

from tensorstow import Plan
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import (
    Aio,
    Batch,
    Fp16,
    OffloadOptimizer,
    OffloadParam,
    Settings,
    Zero,
)
from tensorstow.deepspeed.plans import (
    directory_of,
    dtype_of,
    placement_keywords,
    plan_of,
    world_of,
)

BATCH = Batch(train=24, micro=2, accumulation=3)


def settings(zero: Zero | None = None, **more: object) -> Settings:
    return Settings(BATCH, zero=zero or Zero(), **more)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_and_accumulation_are_the_plan_s(stage: int) -> None:
    plan = plan_of(settings(Zero(stage=stage)))
    assert plan == Plan(parameters="device", states="host", stage=stage, accumulation_steps=3)


@pytest.mark.parametrize(
    ("optimizer", "param", "states", "parameters"),
    [
        ("cpu", "none", "host", "device"),
        ("nvme", "cpu", "disk", "host"),
        ("nvme", "nvme", "disk", "disk"),
    ],
)
def test_devices_are_tiers(optimizer: str, param: str, states: str, parameters: str) -> None:
    zero = Zero(
        stage=3, offload_optimizer=OffloadOptimizer(optimizer), offload_param=OffloadParam(param)
    )
    plan = plan_of(settings(zero))
    assert (plan.states, plan.parameters) == (states, parameters)


def test_groups_of_mics_are_replicas() -> None:
    assert world_of(settings()) == 4
    assert plan_of(settings(Zero(stage=3, mics_shard_size=2))).replicas == 2
    with pytest.raises(OptionError, match="mics_shard_size=3"):
        plan_of(settings(Zero(stage=3, mics_shard_size=3)))


def test_updates_beside_backward_are_refused_where_gradients_are_looked_at_first() -> None:
    assert plan_of(settings(), overlap="backward").overlap == "backward"
    for more in ({"gradient_clipping": 1.0}, {"fp16": Fp16()}):
        assert plan_of(settings(**more), overlap="forward").overlap == "forward"
        with pytest.raises(OptionError, match="before any is used"):
            plan_of(settings(**more), overlap="backward")


def test_dtypes() -> None:
    assert dtype_of(settings()) == torch.float32
    assert dtype_of(settings(bf16=True)) == torch.bfloat16
    assert dtype_of(settings(fp16=Fp16())) == torch.float16


def test_parameters_and_states_have_directories_of_their_own() -> None:
    zero = Zero(3, OffloadOptimizer("nvme", "/a"), OffloadParam("nvme", "/b"))
    assert directory_of(settings(zero)) == "/b"
    told = placement_keywords(settings(zero), {"states": "disk", "dir": "/b"})
    assert told["dir"] == "/a"
    assert directory_of(settings(Zero(3, OffloadOptimizer("nvme", "/a")))) is None


def test_states_on_disk_are_scratch_in_nvme_path() -> None:
    zero = Zero(stage=3, offload_optimizer=OffloadOptimizer("nvme", "/a"))
    told = placement_keywords(
        settings(zero, bf16=True, aio=Aio(queue_depth=8)), {"states": "disk", "dir": "/a"}
    )
    assert told["policy"].depth == 8
    assert (told["dir"], told["durability"], told["state_format"]) == ("/a", "none", "split")


def test_states_in_memory_are_told_of_no_directory() -> None:
    assert placement_keywords(settings(), {"dir": "/a", "module": None}) == {"module": None}


@pytest.mark.parametrize(("elements", "nbytes"), [(0, None), (1000, 2000)])
def test_elements_in_memory_are_the_shelves_bytes(elements: int, nbytes: int | None) -> None:
    param = OffloadParam("nvme", "/a", max_in_cpu=elements)
    plan = plan_of(settings(Zero(3, offload_param=param), bf16=True))
    assert plan.buffer_pool_bytes == nbytes
