"""Seconds of a step: closed forms over declared rates, what binds, break-even."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from machines import AWAY, BATCH, CPU, CUDA, DISK, HERE, PROFILE, SIZES, STATES, UNITS, UPDATE, G
from tensorstow import Plan, Tier
from tensorstow.base.errors import OptionError
from tensorstow.base.update_on import Overlap
from tensorstow.planner.placement import HeldActivations
from tensorstow.planner.seconds import (
    MachineRates,
    MicroBatch,
    break_even_tokens,
    compute_seconds,
    device_share,
    time_of,
    work_of,
)
from tensorstow.planner.sizes import Sizes, UnitSizes

REST = 1 - 1 / UNITS
"""What can be updated beside a pass: all but the first parameter."""


def first(disk: float) -> float:
    """Return the seconds of the first parameter's update, nothing beside it."""
    return (1 - REST) * max(UPDATE, disk)


def test_computing_is_products_elements_and_calls() -> None:
    done = {"tensor_bytes": 2 * 10**9, "calls": 500, "random_elements": 7 * 10**8}
    batch = MicroBatch(1, flops=3 * 10**12, **done)
    assert compute_seconds(batch, torch.float32, CPU) == pytest.approx(3 + 2 + 0.5 + 7)
    with pytest.raises(OptionError, match="float16 on cpu"):
        compute_seconds(batch, torch.float16, CPU)
    with pytest.raises(OptionError, match="on xpu"):
        compute_seconds(batch, torch.float32, replace(CPU, device="xpu"))


def test_everything_in_host_memory_is_computing_and_updating() -> None:
    step = time_of(Plan(), SIZES, HERE, BATCH, CPU)
    assert [phase.name for phase in step.phases] == ["forward", "backward", "update"]
    assert [phase.seconds for phase in step.phases] == pytest.approx([10, 20, UPDATE])
    assert step.binding == "cores"
    assert step.busy == pytest.approx({"cores": 30 + UPDATE})
    assert break_even_tokens(step, BATCH.tokens) is None


def test_checksums_take_cores_from_computing() -> None:
    plan = Plan(Tier.DISK, Tier.DISK, overlap="backward")
    slow = replace(CPU, profile=PROFILE.but(checksums=1e9))
    work = work_of(plan, SIZES, HERE)
    step = time_of(plan, SIZES, HERE, BATCH, slow)
    forward, backward, first = (phase.loads["cores"] for phase in step.phases)
    update = UPDATE + (work.state_read + work.written) / 1e9
    read = work.parameters_read / 2 * 1e-9
    assert forward == pytest.approx(10 + read)
    assert backward == pytest.approx(20 + REST * update + read)
    assert first == pytest.approx((1 - REST) * update)


@pytest.mark.parametrize(
    ("overlap", "seconds"),
    [
        ("none", lambda disk: 10 + 20 + max(UPDATE, disk)),
        ("forward", lambda disk: 20 + max(REST * UPDATE + 10, REST * disk) + first(disk)),
        ("backward", lambda disk: max(REST * UPDATE + 30, REST * disk) + first(disk)),
    ],
)
@pytest.mark.parametrize("slower", [1, 10, 100])
def test_states_on_disk_overlap_as_they_are_told(
    overlap: Overlap, seconds: Callable[[float], float], slower: int
) -> None:
    disk = replace(DISK, mixed=DISK.mixed / slower, write=DISK.write / slower)
    plan = Plan(states=Tier.DISK, overlap=overlap)
    work = work_of(plan, SIZES, HERE)
    assert work.written == STATES
    assert STATES - (48 << 20) <= work.read < STATES  # what the ring holds is not read again
    moving = 2 * work.read / disk.mixed + (work.written - work.read) / disk.write
    step = time_of(plan, SIZES, HERE, BATCH, replace(CPU, disk=disk))
    assert step.seconds == pytest.approx(seconds(moving))
    assert step.binding == ("disk" if moving > 40 else "cores")
    least = break_even_tokens(step, BATCH.tokens)
    assert least == pytest.approx(BATCH.tokens * moving / 30, abs=1)


def test_the_root_s_first_parameter_is_updated_beside_nothing() -> None:
    root = UnitSizes("", 3 * G, 3 * G, ((torch.float32, G // 2), (torch.float32, G // 4)))
    frozen = UnitSizes("frozen", G, G, ())
    sizes = Sizes((*SIZES.units, frozen, root))
    plan = Plan(overlap="backward")
    names = [phase.name for phase in time_of(plan, sizes, HERE, BATCH, CPU).phases]
    assert names == ["forward, backward and update", "update after backward"]
    on_disk = time_of(Plan(Tier.DISK, Tier.DISK, overlap="backward"), sizes, HERE, BATCH, CPU)
    names = [phase.name for phase in on_disk.phases]
    assert names == ["forward", "backward and update", "update after backward"]
    last = time_of(plan, sizes, HERE, BATCH, CPU).phases[-1]
    assert last.seconds == pytest.approx(2)  # half a gibi elements, at a quarter per second
    nothing = Sizes((frozen,))
    assert time_of(plan, nothing, HERE, BATCH, CPU).phases[-1].seconds == 0


def test_parameters_on_disk_are_read_for_each_pass() -> None:
    plan = Plan(Tier.DISK, Tier.DISK, accumulation_steps=2)
    work = work_of(plan, SIZES, HERE)
    kept = 5 * G + 3 * 4096  # three units in memory, and two that are fetched ahead
    assert work.parameters_read == 4 * (UNITS * G - kept)
    assert work.parameters_written == UNITS * G
    step = time_of(plan, SIZES, HERE, BATCH, CPU)
    assert step.compute == pytest.approx(60)
    assert step.phases[0].loads["disk"] == pytest.approx(work.parameters_read / 2 / DISK.read)


def test_an_accelerator_waits_for_its_link() -> None:
    plan = Plan(Tier.HOST)
    work = work_of(plan, SIZES, AWAY)
    assert (work.up, work.down) == (2 * UNITS * G, UNITS * G)
    step = time_of(plan, SIZES, AWAY, BATCH, CUDA)
    assert step.compute == pytest.approx(3)
    assert step.phases[1].loads == pytest.approx({"accelerator": 2, "link up": 0.5, "link down": 1})
    assert step.seconds == pytest.approx(1 + 2 + UPDATE)
    assert step.binding == "cores"
    beside = time_of(plan.but(overlap="backward"), SIZES, AWAY, BATCH, CUDA)
    assert beside.seconds == pytest.approx(UPDATE)  # the cores do not compute
    on_device = work_of(Plan(Tier.DEVICE), SIZES, AWAY)
    assert (on_device.up, on_device.updated_up, on_device.down) == (0, UNITS * G, UNITS * G)
    behind = time_of(Plan(Tier.DEVICE), SIZES, AWAY, BATCH, CUDA)
    assert behind.phases[0].loads == pytest.approx({"accelerator": 1})
    assert behind.phases[2].loads == pytest.approx({"cores": UPDATE, "link up": 0.5})


def test_micro_batches_in_units_share_reads_and_their_gradients_go_down_in_fp32() -> None:
    plan = Plan(parameters="host", accumulation_steps=2)
    alone, shared = (work_of(each, SIZES, AWAY) for each in (plan, plan.but(micro_batches=4)))
    assert shared.up == alone.up
    assert shared.down == 2 * 4 * sum(elements for _, elements in SIZES.trained)


@pytest.mark.parametrize(
    ("plan", "machine", "said"),
    [
        (Plan(states=Tier.DISK), replace(CPU, disk=None), "no directory"),
        (Plan(), replace(CPU, profile=PROFILE.but(update={})), "updates of float32/fp32"),
        (
            Plan(Tier.DEVICE, update_on="device"),
            replace(CUDA, profile=PROFILE.but(device_update={})),
            "on an accelerator",
        ),
    ],
)
def test_rates_that_are_not_known_are_said(plan: Plan, machine: MachineRates, said: str) -> None:
    conditions = HERE if machine.device == "cpu" else AWAY
    with pytest.raises(OptionError, match=said):
        time_of(plan, SIZES, conditions, BATCH, machine)
    if machine.device == "cuda":
        bare = replace(CUDA, profile=PROFILE.but(link=None))
        with pytest.raises(OptionError, match="no link"):
            time_of(Plan(), SIZES, AWAY, BATCH, bare)


THERE = UNITS * G / 4 / (5 * G)
"""Seconds of the update on the accelerator."""


def test_updates_on_the_device_take_its_kernel_and_the_link_both_ways() -> None:
    plan = Plan(Tier.DEVICE, update_on="device")
    step = time_of(plan, SIZES, AWAY, BATCH, CUDA)
    assert [phase.loads for phase in step.phases[:2]] == [
        pytest.approx({"accelerator": 1}),
        pytest.approx({"accelerator": 2}),  # gradients stay
    ]
    loads = {"accelerator": THERE, "link up": STATES / 20 / G, "link down": STATES / 10 / G}
    assert step.phases[2].loads == pytest.approx(loads)
    beside = time_of(plan.but(overlap="backward"), SIZES, AWAY, BATCH, CUDA)
    first = (1 - REST) * STATES / 10 / G  # by the link
    assert beside.seconds == pytest.approx(1 + 2 + REST * THERE + first)  # both on the accelerator


def test_both_sides_update_so_that_they_end_together() -> None:
    plan = Plan(Tier.DEVICE, update_on="hybrid")
    work = work_of(plan, SIZES, AWAY)
    there = device_share("hybrid", work, CUDA)
    alone = [
        time_of(plan.but(update_on=where), SIZES, AWAY, BATCH, CUDA).phases[2].seconds
        for where in ("host", "device")
    ]
    assert alone == pytest.approx([UPDATE, STATES / 10 / G])
    assert there == pytest.approx(alone[0] / sum(alone))
    half = time_of(plan.but(update_on=0.25), SIZES, AWAY, BATCH, CUDA).phases[2]
    down = 0.25 * STATES / 10 / G + 0.75 * UNITS / 10
    assert half.loads["cores"] == pytest.approx(0.75 * UPDATE)
    assert half.loads["link down"] == pytest.approx(down)
    assert device_share("auto", work, CUDA) == 1.0
    slow = replace(CUDA, profile=PROFILE.but(device_update={"float32/fp32": G / 1000}))
    assert device_share("auto", work, slow) == 0.0


def test_an_estimate_is_six_operations_for_each_parameter_and_token() -> None:
    assert MicroBatch.estimate(7, 11) == MicroBatch(11, 6 * 7 * 11, is_estimate=True)


def test_activations_cross_the_disk_and_the_link_once_each_way() -> None:
    batch = MicroBatch(1000, flops=3 * 10**12)
    held = HeldActivations(saved=9 * G)
    plan = Plan(activations="disk", activation_ram_budget=2 * G, accumulation_steps=2)
    here = time_of(plan, SIZES, replace(HERE, activations=held), batch, CPU)
    kept = time_of(Plan(accumulation_steps=2), SIZES, HERE, batch, CPU)
    assert here.compute == kept.compute
    forward, backward, _ = here.phases
    assert forward.loads["disk"] == 2 * (9 - 1) / 2
    assert backward.loads["disk"] == 2 * (9 - 2) / 4
    moved = time_of(Plan(activations="host"), SIZES, replace(AWAY, activations=held), batch, CUDA)
    stays = time_of(Plan(), SIZES, AWAY, batch, CUDA)
    assert moved.busy["link down"] - stays.busy["link down"] == pytest.approx(9 / 10)
    assert moved.busy["link up"] - stays.busy["link up"] == pytest.approx(9 / 20)


def test_backward_computes_blocks_again() -> None:
    batch = MicroBatch(1000, flops=4 * 10**12)
    forward, backward, _ = time_of(Plan(activations="recompute"), SIZES, HERE, batch, CPU).phases
    assert (forward.loads["cores"], backward.loads["cores"]) == (1.0, 3.0)
