"""The tables show the bytes that the engine counts."""

import pytest
import torch
from torch import nn

from tensorstow import deepspeed
from tensorstow.base.errors import OptionError
from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.deepspeed.estimators import (
    _PLANS,
    _needs,
    _Setup,
    estimate_zero2_model_states_mem_needs_all_cold,
    estimate_zero2_model_states_mem_needs_all_live,
    estimate_zero3_model_states_mem_needs_all_cold,
    estimate_zero3_model_states_mem_needs_all_live,
)
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.units import units_of
from tensorstow.io.files import ALIGN
from tensorstow.planner.bounds import MAX_IN_FLIGHT_BYTES, upload_buffers
from tensorstow.planner.placement import Conditions, bytes_of
from tensorstow.planner.sizes import Sizes
from tensorstow.states.layout import Family, slot_bytes

LARGEST = 1 << 21
"""Of which each of four ranks has one whole chunk."""
P = 40 * LARGEST
SPLIT = Family(torch.bfloat16, amsgrad=False, format=StateFormat.SPLIT)
SLOT = slot_bytes(SPLIT, LARGEST // 4, with_weights=False)
RING = (48 << 20) // SLOT * SLOT
STAGED = 64 << 20
"""Of HOST: gradients of chunks on their way to updates, of weights on the device."""
UP = upload_buffers(Plan().prefetch) * LARGEST / 4
"""Elements of a rank's shares of units that go up ahead of their gathers."""
OWN = P / 4
"""A rank's elements: 2 + 2 + 10 bytes of weights, gradients and states in bf16, 4 + 4 + 8 in fp32.
"""
GATHERED = 4 * LARGEST + 2 * OWN + 2 * UP
"""Of the device in bf16: two units' weights, a rank's gradients, and what goes up."""
POOL = 2 * UP + 5 * LARGEST / 4 * 2 + 3 * ALIGN
"""Of HOST, for weights on disk in bf16."""


def model(dtype: torch.dtype = torch.float32, count: int = 4) -> nn.Module:
    blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(count)))
    return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(64, 256)}).to(dtype)


@pytest.mark.parametrize(
    ("plan", "dtype", "gpu", "host", "disk"),
    [
        (Plan(Tier.DEVICE, Tier.HOST, stage=2), "bf16", 2 * P + 4 * OWN, 14 * OWN + STAGED, 0),
        (Plan(Tier.DEVICE, Tier.HOST, stage=2), "fp32", 4 * P + 8 * OWN, 16 * OWN + STAGED, 0),
        (Plan(Tier.DEVICE, Tier.HOST), "bf16", 4 * LARGEST + 4 * OWN, 14 * OWN + STAGED, 0),
        (Plan(Tier.HOST, Tier.HOST), "bf16", GATHERED, 14 * OWN, 0),
        (Plan(Tier.HOST, Tier.HOST), "fp32", 2 * GATHERED, 16 * OWN, 0),
        (Plan(Tier.HOST, Tier.DISK), "bf16", GATHERED, 4 * OWN + RING, 10 * OWN),
        (Plan(Tier.DISK, Tier.DISK), "bf16", GATHERED, 2 * OWN + POOL + RING, 12 * OWN),
    ],
)
def test_bytes_follow_the_formula(
    plan: Plan, dtype: str, gpu: float, host: float, disk: float
) -> None:
    setup = _Setup(P, LARGEST, num_gpus_per_node=2, num_nodes=2, additional_buffer_factor=1.0)
    found = _needs(plan, dtype, setup)
    assert found == (gpu, 2 * host, 2 * disk)
    doubled = _needs(plan, dtype, setup._replace(additional_buffer_factor=2.0))
    assert doubled == tuple(2 * n for n in found)


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_a_model_is_counted_as_the_engine_counts_it(dtype: torch.dtype, name: str) -> None:
    units = units_of(model(dtype, 12))  # more than buffers, also as units of the largest size
    total = sum(p.numel() for unit in units for p in unit.parameters.values())
    largest = max(sum(p.numel() for p in unit.parameters.values()) for unit in units)
    plan = Plan(Tier.HOST, Tier.DISK)
    needed = bytes_of(plan, Sizes.of(units, 1), Conditions(device_is_host=False))
    found = _needs(plan, name, _Setup(total, largest, 1, 1, 1.0))
    assert found == (needed[Tier.DEVICE], needed[Tier.HOST], needed[Tier.DISK])


def test_live_and_cold_print_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    total, largest = 4 * (64 * 64 + 64) + 64 * 256 + 256, 64 * 256 + 256
    for live, cold in [
        (
            lambda: estimate_zero2_model_states_mem_needs_all_live(model(), 2, 3),
            lambda: estimate_zero2_model_states_mem_needs_all_cold(total, 2, 3),
        ),
        (
            lambda: estimate_zero3_model_states_mem_needs_all_live(model(), 2, 3),
            lambda: estimate_zero3_model_states_mem_needs_all_cold(total, largest, 2, 3),
        ),
    ]:
        live()
        first = capsys.readouterr().out
        cold()
        assert capsys.readouterr().out == first


def test_tables_name_places_as_the_configuration_does(capsys: pytest.CaptureFixture[str]) -> None:
    estimate_zero2_model_states_mem_needs_all_cold(1e9)
    two = capsys.readouterr().out.splitlines()
    assert two[0].endswith("ZeRO-2: 1,000,000,000 parameters, 1 x 1 = 1 GPUs.")
    assert len(two) == 2 + 4
    assert " ".join(two[3].split()) == "2.1 GiB | 13.1 GiB | 0 B | bf16, offload_optimizer=cpu"
    estimate_zero3_model_states_mem_needs_all_cold(1e9, 1e8)
    three = capsys.readouterr().out.splitlines()
    assert len(three) == 2 + 12
    assert three[2].endswith("bf16, offload_param=nvme, offload_optimizer=nvme")


def test_numbers_that_make_no_sense_are_refused() -> None:
    with pytest.raises(OptionError, match="num_gpus_per_node=0 was given: it is at least 1"):
        estimate_zero2_model_states_mem_needs_all_cold(1e9, 0)


@pytest.mark.parametrize("plan", [Plan(Tier.DEVICE, Tier.HOST, stage=n) for n in (2, 3)])
def test_one_rank_has_its_weights_once(plan: Plan) -> None:
    """The ZeRO-Offload example's 10 billion: one copy of bf16 weights, and what leaves."""
    found = _needs(plan, "bf16", _Setup(10 * 10**9, 10**8, 1, 1, 1.0))
    assert found[0] == 2 * 10 * 10**9 + MAX_IN_FLIGHT_BYTES


@pytest.mark.parametrize("bf16", [False, True])
def test_an_engine_keeps_the_states_that_were_estimated(bf16: bool) -> None:  # noqa: FBT001
    module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    total = 4 * 64 * 64
    config = {
        "train_batch_size": 2,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW"},
    }
    engine, optimizer, *_ = deepspeed.initialize(model=module, config=config)
    inputs = torch.randn(2, 64, dtype=torch.bfloat16 if bf16 else torch.float32)
    engine.backward(engine(inputs).square().mean())
    engine.step()
    _, host, _ = _needs(_PLANS[2][1], "bf16" if bf16 else "fp32", _Setup(total, 0, 1, 1, 1.0))
    width = 2 if bf16 else 4
    others = 2 * width * total + 4 * total  # weights, gradients, and what these come down through
    assert optimizer._memory().ram_bytes == host - others
    engine.destroy()
