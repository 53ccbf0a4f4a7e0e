"""What a plan holds, item by item; plan="auto", and what is short where nothing fits."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from models import ResidualStack
from remote import make_remote
from tensorstow import AdamW, Budget, Plan, Tier, stow
from tensorstow.base.errors import BudgetError
from tensorstow.base.update_on import OverlapOption
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.units import units_of
from tensorstow.io.files import ALIGN
from tensorstow.planner.bounds import MAX_IN_FLIGHT_BYTES
from tensorstow.planner.placement import (
    Conditions,
    HeldActivations,
    bytes_of,
    fit,
    in_memory_bytes,
    items_of,
    states_of,
)
from tensorstow.planner.search import PlanRequest, search
from tensorstow.planner.seconds import work_of
from tensorstow.planner.sizes import Sizes, UnitSizes, least_in_memory
from tensorstow.states.layout import Family, slot_bytes
from tensorstow.states.policy import PipelinePolicy
from tensorstow.step import backward_overlap as schedule
from tensorstow.step.backward_overlap import WINDOW_BYTES

G = 1 << 30
COUNT, UNIT = 10, G
"""Ten units of a GiB of one rank's fp32 parameters; of all four ranks, 4 GiB each."""


def sizes(ranks: int) -> Sizes:
    trained = ((torch.float32, UNIT // 4),)
    return Sizes(tuple(UnitSizes(str(n), UNIT * ranks, UNIT, trained) for n in range(COUNT)), ranks)


CHUNK = PipelinePolicy().chunk
SLOT = slot_bytes(Family(torch.float32, amsgrad=False), CHUNK, with_weights=False)
RING = (48 << 20) // SLOT * SLOT
COPIED = UNIT
"""Of HOST: the gradients of a unit, of which FSDP2 makes one block."""
POOLED = 3 * UNIT + 3 * ALIGN
"""Of HOST: three units of parameters on DISK."""
AWAY = Conditions(device_is_host=False)
HERE = Conditions(device_is_host=True)
DEVICE = (COUNT + 2 * 4) * G + MAX_IN_FLIGHT_BYTES
"""Parameters, two units unsharded, and gradients on their way down, of one rank of four."""
UPLOADED = 3 * UNIT
STAGED = 64 << 20
"""Of HOST: gradients of chunks on their way to updates, of parameters on DEVICE."""
LESS = 2 * COUNT * G + RING
"""Of HOST: parameters and gradients, with states on DISK."""


def auto_plan(sizes: Sizes, budget: Budget, conditions: Conditions) -> Plan:
    return search(PlanRequest(sizes, budget, conditions)).chosen.plan


def _placed(budget: Budget, conditions: Conditions = AWAY, ranks: int = 4) -> tuple[Tier, ...]:
    """Return the tiers that parameters are on, and the states'."""
    plan = auto_plan(sizes(ranks), budget, conditions)
    tiers = {plan.tier_of(str(n)) for n in range(COUNT)}
    return *(tier for tier in Tier if tier in tiers), plan.states


def test_everything_is_as_high_as_it_fits() -> None:
    assert _placed(Budget()) == (Tier.DEVICE, Tier.HOST)
    assert _placed(Budget(device=DEVICE, host=4 * COUNT * G + STAGED)) == (Tier.DEVICE, Tier.HOST)
    assert _placed(Budget(device=DEVICE, host=LESS + STAGED)) == (Tier.DEVICE, Tier.DISK)
    assert _placed(Budget(device=DEVICE - 1)) == (Tier.DEVICE, Tier.HOST, Tier.HOST)
    below = 8 * G + UPLOADED + MAX_IN_FLIGHT_BYTES
    assert _placed(Budget(device=below, host=4 * COUNT * G)) == (Tier.HOST, Tier.HOST)
    assert _placed(Budget(device=below, host=LESS)) == (Tier.HOST, Tier.DISK)
    assert _placed(Budget(device=below, host=LESS - 1)) == (Tier.HOST, Tier.DISK, Tier.DISK)
    least = Budget(device=below, host=COUNT * G + POOLED + UPLOADED + RING)
    assert _placed(least) == (Tier.DISK, Tier.DISK)


def test_one_rank_has_its_weights_once() -> None:
    device = bytes_of(Plan(Tier.DEVICE), sizes(1), AWAY)[Tier.DEVICE]
    assert device == COUNT * G + MAX_IN_FLIGHT_BYTES
    assert bytes_of(Plan(Tier.HOST), sizes(1), HERE) == {
        Tier.DEVICE: 0,
        Tier.HOST: 4 * COUNT * G,
        Tier.DISK: 0,
    }


def test_ranks_on_cpus_unshard_in_host_memory() -> None:
    found = bytes_of(Plan(Tier.HOST), sizes(4), HERE)
    assert found[Tier.HOST] == (4 * COUNT + 2 * 4) * G + COPIED * 4


def test_ordered_gradients_of_a_unit_come_from_all_ranks() -> None:
    without = bytes_of(Plan(Tier.HOST), sizes(4), HERE)
    ordered = bytes_of(Plan(Tier.HOST, ordered_reduce="mean"), sizes(4), HERE)
    assert ordered[Tier.HOST] == without[Tier.HOST] + 4 * G
    alone = bytes_of(Plan(Tier.HOST, ordered_reduce="mean"), sizes(1), HERE)
    assert alone == bytes_of(Plan(Tier.HOST), sizes(1), HERE)


def test_ordered_gradients_of_16_bit_weights_wait_in_fp32() -> None:
    trained = ((torch.bfloat16, UNIT // 2),)
    units = tuple(UnitSizes(str(n), 4 * UNIT, UNIT, trained) for n in range(COUNT))
    for order, width in ((None, 1), ("sum", 2)):
        held = items_of(Plan(Tier.HOST, ordered_reduce=order), Sizes(units, 4), AWAY)
        (gradients,) = [i.nbytes for i in held if i.purpose == "gradients"]
        assert gradients == width * COUNT * UNIT


@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_all_parameters_stay_unsharded(stage: int) -> None:
    found = bytes_of(Plan(Tier.DEVICE, stage=stage), sizes(4), AWAY)
    assert found[Tier.DEVICE] == (COUNT + 4 * COUNT) * G + MAX_IN_FLIGHT_BYTES


def test_units_are_counted_where_each_is() -> None:
    plan = Plan(Tier.HOST, parameter_units={"0": Tier.DISK, "1": Tier.DISK})
    held = {(item.tier, item.purpose): item.nbytes for item in items_of(plan, sizes(1), HERE)}
    assert held[Tier.HOST, "parameters"] == 8 * G
    assert held[Tier.DISK, "parameters"] == 2 * G
    assert held[Tier.HOST, "parameters from disk, in memory"] == 2 * G  # both, and no third


def test_gradients_that_do_not_fit_are_used_beside_backward() -> None:
    roomy = COUNT * G + COPIED + POOLED + RING
    tight = G + WINDOW_BYTES + COPIED + POOLED + RING
    assert auto_plan(sizes(1), Budget(host=roomy), HERE).overlap == "forward"
    assert auto_plan(sizes(1), Budget(host=tight), HERE).overlap == "backward"
    with pytest.raises(BudgetError, match=r"1 B of HOST"):
        auto_plan(sizes(1), Budget(host=tight - 1), HERE)


def test_beside_a_device_gradients_of_several_units_wait() -> None:
    plan = Plan(Tier.HOST, overlap="backward")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(40)))
    many = Sizes.of(units_of(model), 1)
    unit = many.units[0].gradient_bytes
    held = {
        away: next(
            item.nbytes
            for item in items_of(plan, many, where)
            if (item.tier, item.purpose) == (Tier.HOST, "gradients")
        )
        for away, where in ((False, HERE), (True, AWAY))
    }
    assert held == {
        False: WINDOW_BYTES + unit,
        True: 3 * unit + unit + MAX_IN_FLIGHT_BYTES + unit,
    }


def test_units_on_disk_have_what_the_budget_leaves() -> None:
    least = COUNT * G + COPIED + POOLED + RING
    for host, in_memory in (
        (least, POOLED),
        (least + G - 1, POOLED),
        (least + G, POOLED + G),
        (least + 5 * G, POOLED + 2 * G),  # two are fetched ahead
    ):
        plan = fit(Plan(Tier.DISK, Tier.DISK), sizes(1), Budget(host=host), HERE)
        assert isinstance(plan, Plan)
        assert plan.weight_ram_budget == in_memory
        assert bytes_of(plan, sizes(1), HERE)[Tier.HOST] <= host


def test_codes_stay_codes_where_they_wait() -> None:
    """Values are in buffers of some units; below stage 3 all are decoded for good."""
    trained, codes = ((torch.float32, 10),), UNIT // 4
    units = tuple(
        UnitSizes(str(n), UNIT, UNIT, trained, coded_bytes=codes, decoded_bytes=UNIT - 40)
        for n in range(COUNT)
    )
    coded = Sizes(units)
    stored, buffers = COUNT * (40 + codes), COUNT * (UNIT + codes)
    on_host, on_disk = Plan(parameters="host"), Plan(parameters="disk")
    held = {item.purpose: item.nbytes for item in items_of(on_host, coded, HERE)}
    assert held["parameters"] == stored
    assert held["parameters that are decoded"] == in_memory_bytes(on_host, coded) < COUNT * UNIT
    whole = {i.purpose: i.nbytes for i in items_of(on_host.but(stage=1), coded, HERE)}
    assert whole["parameters"] == COUNT * UNIT
    assert "parameters that are decoded" not in whole
    held = {item.purpose: item.nbytes for item in items_of(on_disk, coded, HERE)}
    assert held["parameters"] == stored
    pool = held["parameters from disk, in memory"]
    assert pool == least_in_memory([UNIT + codes] * COUNT) + on_disk.prefetch * (UNIT + codes)
    work = work_of(on_disk, coded, HERE)
    assert work.parameters_read == 2 * (stored - stored * pool // buffers)
    room = bytes_of(on_host, coded, HERE)[Tier.HOST]
    plain = Sizes(tuple(UnitSizes(str(n), UNIT, UNIT, trained) for n in range(COUNT)))
    chosen = [auto_plan(units, Budget(host=room), HERE) for units in (coded, plain)]
    assert [{plan.tier_of(str(n)) for n in range(COUNT)} for plan in chosen] == [
        {Tier.HOST},
        {Tier.HOST, Tier.DISK},
    ]


def test_unequal_units_need_the_three_largest() -> None:
    assert least_in_memory([1 << 20, 5 << 20, 2 << 20, 3 << 20]) == (10 << 20) + 3 * ALIGN


def deep() -> ResidualStack:
    """Return blocks of a MiB."""
    return ResidualStack(512, 40)


def test_a_run_holds_no_more_than_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "WINDOW_BYTES", 2 << 20)
    budget = (48 << 20) + (7 << 20)  # the window and a unit of gradients, three units, some more
    model, optimizer = stow(deep(), partial(AdamW, lr=1e-3), budget=Budget(host=budget))
    for _ in range(3):
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory, pinned = optimizer._memory(), parameter_bytes(model).most_buffer_pool_bytes
    optimizer.close()
    assert pinned > 3 << 20  # the sum below is of a run whose parameters are on disk
    assert memory.ring_bytes + memory.gradient_bytes + pinned <= budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(Tier.HOST, Tier.HOST),
        Plan(Tier.HOST, Tier.DISK),
        Plan(Tier.HOST, Tier.DISK, ram_budget="52MiB"),
        Plan(Tier.DISK, Tier.DISK),
    ],
)
def test_states_are_predicted_as_the_optimizer_holds_them(dtype: torch.dtype, plan: Plan) -> None:
    model = deep().to(dtype)
    model.blocks[0].weight.requires_grad = False
    model.blocks[1].weight = model.blocks[2].weight  # tied
    predicted = states_of(plan, Sizes.of(units_of(model), 1), HERE)
    model, optimizer = stow(model, partial(AdamW, lr=1e-3), plan=plan)
    model(torch.randn(2, 512, dtype=dtype)).square().mean().backward()
    optimizer.step()
    found = optimizer._memory()
    optimizer.close()
    assert found == predicted


@pytest.mark.parametrize("tier", [Tier.HOST, Tier.DISK])
def test_what_may_be_undone_is_predicted_twice(tier: Tier) -> None:
    plan = Plan(tier, Tier.DISK, overlap="speculative")
    model = deep()
    sizes = Sizes.of(units_of(model), 1)
    held = {(item.tier, item.purpose): item.nbytes for item in items_of(plan, sizes, HERE)}
    model, optimizer = stow(model, partial(AdamW, lr=1e-3), plan=plan)
    model(torch.randn(2, 512)).square().mean().backward()
    optimizer.step()
    found = optimizer._memory()
    optimizer.close()
    assert states_of(plan, sizes, HERE).file_bytes == found.file_bytes
    assert held[Tier.DISK, "states"] == found.file_bytes
    assert held.get((Tier.HOST, "old weights"), 0) == found.host_weight_bytes
    weights = sum(p.nbytes for p in model.parameters())
    assert held[tier, "old weights"] == held[tier, "parameters"] == weights
    assert held[Tier.HOST, "gradients"] == found.gradient_bytes


def test_what_may_be_undone_has_a_third_place_in_a_run_that_commits() -> None:
    sizes, conditions = Sizes.of(units_of(deep()), 1), replace(HERE, commits=True)

    def held(overlap: OverlapOption) -> dict[str, int]:
        plan = Plan(Tier.HOST, Tier.DISK, overlap=overlap)
        items = items_of(plan, sizes, conditions)
        return {item.purpose: item.nbytes for item in items if item.tier == Tier.DISK}

    commits = held("backward")["two commits"]
    assert held("speculative") == {
        "two commits": commits,
        "updates that may be undone": commits // 2,
    }


@pytest.mark.parametrize("kept_as", StateFormat)
@pytest.mark.parametrize("states", [Tier.HOST, Tier.DISK])
def test_states_of_each_format_are_predicted(kept_as: StateFormat, states: Tier) -> None:
    model, plan = deep().to(torch.bfloat16), Plan(Tier.HOST, states)
    conditions = replace(HERE, state_format=kept_as)
    predicted = states_of(plan, Sizes.of(units_of(model), 1), conditions)
    make = partial(AdamW, lr=1e-3, state_format=str(kept_as))
    model, optimizer = stow(model, make, plan=plan)
    model(torch.randn(2, 512, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    found = optimizer._memory()
    optimizer.close()
    assert found == predicted


def test_a_run_with_units_on_two_tiers_holds_what_is_predicted() -> None:
    sizes = Sizes.of(units_of(deep()), 1)
    budget = Budget(host=sizes.gradient_bytes + (48 << 20) + (26 << 20))
    plan = auto_plan(sizes, budget, replace(HERE, states=Tier.DISK))
    above = [unit.name for unit in sizes.units if plan.tier_of(unit.name) == Tier.HOST]
    assert 0 < len(above) < 40
    held = {(i.tier, i.purpose): i.nbytes for i in items_of(plan, sizes, HERE)}
    model, optimizer = stow(deep(), partial(AdamW, lr=1e-3), plan=plan)
    for _ in range(2):
        model(torch.randn(2, 512)).square().mean().backward()
        gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
    found, memory = parameter_bytes(model), optimizer._memory()
    optimizer.close()
    assert held.pop((Tier.HOST, "gradients of a unit, copied")) == sizes.units[1].gradient_bytes
    pooled = held.pop((Tier.HOST, "parameters from disk, in memory"))
    assert 0 <= pooled - found.most_buffer_pool_bytes < 3 * ALIGN
    assert held == {
        (Tier.HOST, "parameters"): found.host_bytes,
        (Tier.DISK, "parameters"): found.disk_bytes,
        (Tier.HOST, "gradients"): gradients,
        (Tier.HOST, "ring of states"): memory.ring_bytes,
        (Tier.DISK, "states"): memory.file_bytes,
    }


@pytest.mark.parametrize("states", [Tier.HOST, Tier.DISK])
def test_a_run_that_commits_is_predicted_too(states: Tier, tmp_path: Path) -> None:
    plan = Plan(Tier.HOST, states)
    predicted = states_of(plan, Sizes.of(units_of(deep()), 1), replace(HERE, commits=True))
    make = partial(AdamW, lr=1e-3, states=str(states))
    model, optimizer = stow(deep(), make, plan=plan, dir=tmp_path)
    model(torch.randn(2, 512)).square().mean().backward()
    optimizer.step()
    optimizer.commit()
    found = optimizer._memory()
    optimizer.close()
    assert found == predicted


def test_commits_take_their_room_on_disk() -> None:
    for states in Tier.HOST, Tier.DISK:
        conditions = Conditions(device_is_host=True, commits=True, states=states)
        needed = bytes_of(Plan(Tier.HOST, states), sizes(1), conditions)[Tier.DISK]
        assert needed == 2 * 3 * COUNT * G  # weights and both moments
        auto_plan(sizes(1), Budget(disk=needed), conditions)
        with pytest.raises(BudgetError, match=r"of DISK"):
            auto_plan(sizes(1), Budget(disk=needed - 1), conditions)


@pytest.mark.parametrize("states", ["host", "ram", "disk"])
def test_a_run_that_commits_stays_within_its_disk(states: str, tmp_path: Path) -> None:
    make = partial(AdamW, lr=1e-3, states=states)
    nbytes = sum(p.nbytes for p in deep().parameters())
    room = int(6.1 * nbytes)  # biases share chunks whose streams are whole disk blocks
    with pytest.raises(BudgetError, match="of DISK"):
        stow(deep(), make, budget=Budget(disk=5 * nbytes), dir=tmp_path)
    model, optimizer = stow(deep(), make, budget=Budget(disk=room), dir=tmp_path)
    for _ in range(3):
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.commit()
    optimizer.close()
    held = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*"))
    assert 3 * nbytes < held < 6.5 * nbytes  # files grow by steps


def test_the_cpu_is_device_and_host() -> None:
    assert _placed(Budget(), HERE, 1) == (Tier.HOST, Tier.HOST)
    assert _placed(Budget(host=LESS), HERE, 1) == (Tier.HOST, Tier.DISK)


def test_sums_of_micro_batches_are_counted_in_fp32() -> None:
    trained = ((torch.bfloat16, UNIT // 2),)
    half = Sizes(tuple(UnitSizes(str(n), UNIT, UNIT, trained) for n in range(COUNT)))

    def held(plan: Plan, conditions: Conditions) -> dict[tuple[Tier, str], int]:
        found = items_of(plan, half, conditions)
        return {(i.tier, i.purpose): i.nbytes for i in found if "gradients" in i.purpose}

    several = Plan(Tier.HOST, accumulation_steps=2)
    assert held(Plan(Tier.HOST), HERE) == {(Tier.HOST, "gradients"): COUNT * G}
    assert held(several, HERE) == {(Tier.HOST, "gradients"): 2 * COUNT * G}
    beside = several.but(overlap="backward")  # the sums of all units wait for the last backward
    assert held(beside, HERE) == {(Tier.HOST, "gradients"): 2 * COUNT * G}
    away = {
        (Tier.HOST, "gradients"): 2 * COUNT * G,
        (Tier.HOST, "gradients of the first micro-batch"): COUNT * G,
        (Tier.HOST, "buffers for gradients"): 32 << 20,
        (Tier.DEVICE, "gradients on their way"): MAX_IN_FLIGHT_BYTES,
    }
    assert held(several, AWAY) == away
    assert held(beside, AWAY) == away
    there = several.but(parameters="device", overlap="backward")
    staged = {(Tier.HOST, "buffers for gradients of chunks"): STAGED}
    assert held(there, AWAY) == {(Tier.DEVICE, "gradients"): 2 * COUNT * G, **staged}
    one = there.but(accumulation_steps=1)  # no window there: backward waits for no update
    assert held(one, AWAY) == {(Tier.DEVICE, "gradients"): COUNT * G, **staged}
    same = sizes(1)  # fp32 gradients: the sum is where the first one is
    wide = {(i.tier, i.purpose) for i in items_of(several, same, AWAY)}
    assert (Tier.HOST, "gradients of the first micro-batch") not in wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_has_the_gradients_that_are_counted(dtype: torch.dtype) -> None:
    model = deep().to(dtype)
    for steps in (1, 2):
        plan = Plan(Tier.HOST, accumulation_steps=steps)
        counted = items_of(plan, Sizes.of(units_of(model), 1), HERE)
        placed, optimizer = stow(deep().to(dtype), partial(AdamW, lr=1e-3), plan=plan)
        for _ in range(steps):
            placed(torch.randn(2, 512, dtype=dtype)).square().mean().backward()
        found = sum(p.grad.nbytes for p in placed.parameters() if p.grad is not None)
        optimizer.close()
        assert found == next(i.nbytes for i in counted if i.purpose == "gradients")


@pytest.mark.parametrize("parameters", [Tier.DEVICE, Tier.HOST])
def test_beside_backward_gradients_wait_where_their_unit_is(parameters: Tier) -> None:
    """Whatever tier the plan calls the default, nothing bounds them beside units on a device."""
    other = Tier.HOST if parameters == Tier.DEVICE else Tier.DEVICE
    plan = Plan(parameters, parameter_units={"0": other}, overlap="backward")
    held = {i.tier: i.nbytes for i in items_of(plan, sizes(1), AWAY) if i.purpose == "gradients"}
    assert held == {parameters: (COUNT - 1) * UNIT, other: UNIT}


def test_gradients_that_leave_beside_backward_are_counted_on_the_device() -> None:
    plan = Plan(Tier.HOST, overlap="backward")
    held = {i.tier: i.nbytes for i in items_of(plan, sizes(1), AWAY) if "on their way" in i.purpose}
    assert held == {Tier.DEVICE: MAX_IN_FLIGHT_BYTES}


def test_what_is_short_is_said() -> None:
    with pytest.raises(BudgetError, match=r"11\.2 GiB of DEVICE"):
        auto_plan(sizes(4), Budget(device=0), AWAY)
    with pytest.raises(BudgetError, match=r"11\.0 GiB of HOST.*with overlap=\"backward\""):
        auto_plan(sizes(1), Budget(disk=0, host=LESS - 1), HERE)
    request = PlanRequest(sizes(1), Budget(disk=0, host=LESS - 1), HERE, overlap="none")
    with pytest.raises(BudgetError, match=r"20\.0 GiB of HOST"):
        search(request)


def test_sizes_are_a_ranks_share() -> None:
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    of_two = Sizes.of(units_of(model), 2)
    assert of_two == Sizes((UnitSizes("", 128, 128, ((torch.bfloat16, 32),)),), 2)
    assert (of_two.whole_bytes, of_two.share_bytes, of_two.gradient_bytes) == (128, 128, 64)
    model.weight.requires_grad = False
    assert Sizes.of(units_of(model), 1) == Sizes((UnitSizes("", 128, 128, ()),), 1)


@pytest.mark.parametrize("parameters", [Tier.HOST, Tier.DISK])
def test_what_weights_pass_through_counts_where_the_device_has_memory(parameters: Tier) -> None:
    plan = Plan(parameters=parameters, states=parameters)
    here = bytes_of(plan, sizes(4), HERE)
    away = bytes_of(plan, sizes(4), AWAY)
    assert away[Tier.DEVICE] == 8 * G + UPLOADED + MAX_IN_FLIGHT_BYTES
    staged = UPLOADED if parameters == Tier.DISK else 0
    assert away[Tier.HOST] - here[Tier.HOST] == staged - 8 * G - 4 * COPIED


def test_host_weights_count_where_parameters_are_on_the_device() -> None:
    held = bytes_of(auto_plan(sizes(4), Budget(), AWAY), sizes(4), AWAY)
    assert held == {Tier.DEVICE: DEVICE, Tier.HOST: 4 * COUNT * G + STAGED, Tier.DISK: 0}


def test_frozen_parameters_have_no_host_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    make_remote(monkeypatch)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    for number in (0, 2):
        model[number].weight.requires_grad = False
    held = items_of(Plan("device"), Sizes.of(units_of(model), 1), AWAY)
    (predicted,) = [i.nbytes for i in held if i.purpose == "weights that updates write"]
    with AdamW(model.parameters(), lr=1e-3) as optimizer:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert optimizer._memory().host_weight_bytes == predicted == 2 * 4 * 64**2


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_of_one_micro_batch_gradients_come_when_activations_go(
    away: bool,  # noqa: FBT001
    micro_batches: int,
) -> None:
    peak = 10 * sizes(1).gradient_bytes
    held = HeldActivations(peak=peak, beside_gradients=peak // 100)
    conditions = replace(AWAY if away else HERE, activations=held)
    plan = Plan("device", accumulation_steps=micro_batches)
    tier = Tier.DEVICE if away else Tier.HOST
    items = {i.purpose: i.nbytes for i in items_of(plan, sizes(1), conditions) if i.tier == tier}
    gradients = items.get("gradients", 0) + items.get("gradients on their way", 0)
    assert gradients > 0
    # Of two the first one's gradients are there when the second one's backward begins.
    assert items["activations"] == (peak - gradients if micro_batches == 1 else peak)


@pytest.mark.parametrize("parameters", [Tier.HOST, Tier.DISK])
def test_large_gradients_cannot_be_where_small_activations_were(parameters: Tier) -> None:
    def held(**of: int) -> int:
        held = HeldActivations(peak=9 * G, **of)
        items = items_of(Plan(parameters, parameters), sizes(1), replace(HERE, activations=held))
        return sum(
            item.nbytes
            for item in items
            if item.purpose in ("activations", "gradients", "gradients of a unit, copied")
        )

    gradients = COUNT * G + (COPIED if parameters == Tier.DISK else 0)
    assert held(small=9 * G) == 9 * G + gradients
    assert held(large=9 * G) == gradients
    assert held(small=2 * G, large=7 * G) == 2 * G + gradients
    # Large activations that exist beside all gradients: the copy comes after them.
    beside = 2 * G
    assert held(large=9 * G, beside_gradients=beside, large_beside_gradients=beside) == 12 * G


def test_gradients_of_several_micro_batches_on_the_cpu() -> None:
    disk = Plan(Tier.DISK, Tier.DISK)

    def copied(plan: Plan, **of: int) -> int:
        conditions = replace(HERE, activations=HeldActivations(**of))
        items = {i.purpose: i.nbytes for i in items_of(plan, sizes(1), conditions)}
        return items.get("gradients of a unit, copied", 0)

    # The sums stay; a unit's new gradients and their copy come beside them.
    assert copied(disk.but(accumulation_steps=2)) == 2 * COPIED
    assert copied(disk.but(accumulation_steps=2), peak=9 * G) == 0


def test_sums_of_narrow_gradients_are_large_by_their_own_size() -> None:
    narrow = Sizes((UnitSizes("0", 5 << 20, 5 << 20, ((torch.bfloat16, 5 << 19),)),), 1)
    held = HeldActivations(peak=8 << 20, small=8 << 20)
    plan = Plan(Tier.HOST, Tier.HOST, micro_batches=4)
    items = items_of(plan, narrow, replace(HERE, activations=held))
    nbytes = {item.purpose: item.nbytes for item in items}
    assert nbytes["gradients"] == 10 << 20
    assert nbytes["activations"] == 8 << 20


MOVED = HeldActivations(peak=100 << 20, beside_gradients=20 << 20, saved=G, largest_saved=8 << 20)


@pytest.mark.parametrize("away", [False, True])
def test_activations_are_counted_where_they_wait(away: bool) -> None:  # noqa: FBT001
    conditions = replace(AWAY if away else HERE, activations=MOVED)

    def held(**placed: object) -> dict[tuple[Tier, str], int]:
        items = items_of(Plan("device", "host", **placed), sizes(1), conditions)
        return {(i.tier, i.purpose): i.nbytes for i in items if "activations" in i.purpose}

    here = Tier.DEVICE if away else Tier.HOST
    gradients = sizes(1).gradient_bytes
    there = MOVED.peak if away else max(MOVED.beside_gradients, MOVED.peak - gradients)
    assert held() == held(activations="recompute") == {(here, "activations"): there}
    moved = (Tier.HOST, "saved activations")
    assert held(activations="host")[moved] == G
    budget = 256 << 20
    on_disk = held(activations="disk")
    assert on_disk[moved] == budget + MOVED.largest_saved
    assert on_disk[Tier.DISK, "saved activations"] == G - budget // 2
    more = held(activations="disk", activation_ram_budget="4GiB")
    assert more == {(here, "activations"): there, moved: G}
