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


def placed(given: Settings, *, device_is_host: bool = True) -> Plan:
    return plan_of(given, device_is_host=device_is_host)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_and_accumulation_are_the_plan_s(stage: int) -> None:
    plan = placed(settings(Zero(stage=stage)))
    where = Plan(parameters="device", states="host", overlap="forward")
    assert plan == where.but(stage=stage, accumulation_steps=3)


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
    plan = placed(settings(zero))
    assert (plan.states, plan.parameters) == (states, parameters)


def test_groups_of_mics_are_replicas() -> None:
    assert world_of(settings()) == 4
    assert placed(settings(Zero(stage=3, mics_shard_size=2))).replicas == 2


NEEDS = [{"gradient_clipping": 1.0}, {"fp16": Fp16()}, {"bf16": True, "check_grad_overflow": True}]


@pytest.mark.parametrize("device", ["none", "cpu"])
def test_updates_run_beside_the_next_forward_where_weights_may_wait(device: str) -> None:
    zero = Zero(3, OffloadOptimizer("nvme", "/a"), OffloadParam(device, "/b"))
    for more in ({}, *NEEDS):
        assert placed(settings(zero, **more)).overlap == "forward"


def test_parameters_on_disk_are_updated_beside_backward_unless_all_gradients_are_needed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "tensorstow")
    zero = Zero(3, OffloadOptimizer("nvme", "/a"), OffloadParam("nvme", "/b"))
    assert placed(settings(zero, bf16=True)).overlap == "backward"
    (said,) = caplog.messages
    assert said.startswith(
        "the DeepSpeed configuration means parameters=disk, states=disk, stage=3"
    )
    assert 'overlap="backward" (parameters are on disk, and nothing needs all gradients' in said
    for more in NEEDS:
        assert placed(settings(zero, **more)).overlap == "forward"
        assert "exact with clipping, scaling and skipped steps" in caplog.messages[-1]
        with pytest.raises(OptionError, match=f'overlap="backward" was given with .*{[*more][-1]}'):
            plan_of(settings(zero, **more), device_is_host=True, overlap="backward")


def test_the_user_says_when_updates_run() -> None:
    zero = Zero(3, OffloadOptimizer("nvme", "/a"), OffloadParam("nvme", "/b"))
    assert plan_of(settings(zero), device_is_host=True, overlap="none").overlap == "none"
    assert plan_of(settings(), device_is_host=True, overlap="backward").overlap == "backward"
    assert plan_of(settings(zero), device_is_host=True, overlap="forward").overlap == "forward"
    shared = settings(Zero(3, OffloadOptimizer("cpu", ratio=0.25)))
    with pytest.raises(
        OptionError,
        match=r'"forward" was given with a ratio below 1: .* Use overlap="none" or "back',
    ):
        plan_of(shared, device_is_host=False, overlap="forward")


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_the_accelerator_updates_what_the_cpu_does_not(device: str) -> None:
    zero = Zero(3, OffloadOptimizer(device, "/a", ratio=0.25))
    plan = placed(settings(zero), device_is_host=False)
    assert (plan.update_on, plan.overlap) == (0.75, "backward")
    clipped = placed(settings(zero, gradient_clipping=1.0), device_is_host=False)
    assert (clipped.update_on, clipped.overlap) == (0.75, "none")
    zero = Zero(3, OffloadOptimizer("cpu", ratio=0.25), OffloadParam("cpu"))
    with pytest.raises(OptionError, match=r"ratio=0\.25 was given with offload_param"):
        placed(settings(zero), device_is_host=False)


def test_a_share_that_nothing_can_update_is_refused() -> None:
    zero = Zero(3, OffloadOptimizer("cpu", ratio=0.25))
    with pytest.raises(OptionError, match=r"ratio=0\.25 was given, and there is no accelerator"):
        placed(settings(zero))
    off = settings(Zero(3, OffloadOptimizer("none", ratio=0.5)))
    with pytest.raises(OptionError, match=r'ratio=0\.5 was given, and device is "none"'):
        placed(off, device_is_host=False)


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
    plan = placed(settings(Zero(3, offload_param=param), bf16=True))
    assert plan.weight_ram_budget == nbytes
