"""The search: the fastest plan that fits, by declared rates; without them the first that fits."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, product
from typing import Any

import pytest
import torch

from machines import AWAY, BATCH, CPU, CUDA, DISK, HERE, PROFILE, SIZES, UNITS, G
from parity.cover import crossed
from tensorstow import Budget, Plan, Tier
from tensorstow.base.activation_placement import ActivationPlacement
from tensorstow.base.errors import BudgetError
from tensorstow.base.profile import DirectoryRates, LinkRates
from tensorstow.base.update_on import Overlap
from tensorstow.formats.state_format import StateFormat
from tensorstow.planner.placement import Conditions, HeldActivations, bytes_of, fit
from tensorstow.planner.search import (
    Alternative,
    MicroBatching,
    PlanRequest,
    candidates,
    search,
    search_by_rates,
    uses_disk,
)
from tensorstow.planner.seconds import MachineRates, MicroBatch, time_of
from tensorstow.planner.sizes import Sizes, UnitSizes, least_in_memory

HOST_BYTES = 4 * UNITS * G
"""Of parameters, gradients and two moments."""


def test_without_rates_the_first_that_fits_is_chosen() -> None:
    found = search(PlanRequest(SIZES, Budget(), HERE))
    assert found.chosen.plan == Plan(Tier.HOST, Tier.HOST)
    assert found.chosen.step is None
    assert [each.plan.parameters for each in found.tried] == 2 * [Tier.HOST] + 2 * [Tier.DISK]


def test_rates_choose_when_updates_run() -> None:
    request = PlanRequest(SIZES, Budget(host=HOST_BYTES - 1), HERE, batch=BATCH, spend=False)
    slow = replace(CPU, disk=replace(DISK, mixed=G, write=G))
    found = search(replace(request, machine=slow))
    assert (found.chosen.plan.states, found.chosen.plan.overlap) == (Tier.DISK, "speculative")
    assert found.chosen.step is not None
    times = {
        each.plan.optimizer_overlap: each.step.seconds
        for each in found.tried
        if each.step is not None and each.plan.parameters == Tier.HOST
    }
    assert times["none"] > times["forward"] > times["backward"] == times["speculative"]
    ranks = search(replace(request, machine=slow, sizes=replace(SIZES, ranks=2)))
    assert (ranks.chosen.plan.states, ranks.chosen.plan.overlap) == (Tier.DISK, "forward")
    beside = next(each for each in found.tried if each.plan.overlap == "backward" and each.step)
    assert "clipping" in found.reason(beside)
    assert "of HOST short" in found.reason(found.tried[0])


SLOW_DISK = replace(CUDA, disk=replace(DISK, mixed=G, write=G))


def undone(sizes: Sizes = SIZES, disk: int | None = None, **fields: Any) -> list[Alternative]:  # noqa: ANN401
    """Return what fits of the plans whose updates may be undone, with too little memory."""
    budget = Budget(device=6 * G, host=18 * G, disk=disk)
    found = search(PlanRequest(sizes, budget, AWAY, batch=BATCH, machine=SLOW_DISK, **fields))
    return [each for each in found.tried if each.plan.timing.can_undo and not each.short]


def test_updates_may_be_undone_where_weights_are_on_disk_and_it_has_the_room() -> None:
    (beside,) = undone()
    assert beside.plan.parameter_tiers == {Tier.DISK}
    assert beside.step is not None
    later = time_of(beside.plan.but(overlap="forward"), SIZES, AWAY, BATCH, SLOW_DISK)
    assert beside.step.seconds < later.seconds
    assert not undone(overlap="none")
    assert not undone(disk=HOST_BYTES)
    assert not undone(replace(SIZES, ranks=2))


def test_reasons_tell_small_gains_and_name_no_seconds_of_a_batch_that_nobody_named() -> None:
    request = PlanRequest(SIZES, Budget(), HERE, batch=BATCH, machine=CPU)
    found = search(request)
    chosen = found.chosen
    assert chosen.step is not None
    seconds = chosen.step.seconds
    assert found.reason(chosen) == f"{seconds:.3g} s per step"
    phases = tuple(
        replace(each, loads={name: 1.01 * load for name, load in each.loads.items()})
        for each in chosen.step.phases
    )
    slower = replace(found, chosen=replace(chosen, step=replace(chosen.step, phases=phases)))
    simpler = "less than 2% faster than the simpler plan that was chosen"
    assert slower.reason(chosen) == f"{seconds:.3g} s per step; {simpler}"
    guessed = search(replace(request, batch=replace(BATCH, is_estimate=True)))
    told = guessed.reason(guessed.chosen)
    assert told == "about 1.00 times the chosen plan's time, at 1,000 tokens a step"


def test_plans_that_differ_in_numbers_alone_are_told_once() -> None:
    request = PlanRequest(SIZES, Budget(host=HOST_BYTES - 1), HERE, batch=BATCH, machine=CPU)
    found = search(request)
    told = found.distinct()
    assert any(each is found.chosen for each in told)
    assert [each for each in found.tried if each in told] == told
    kinds = [_without_numbers(each.plan) for each in told]
    assert all(kinds.count(each) == 1 for each in kinds)
    left_out = [each for each in found.tried if each not in told]
    assert len(left_out) == 3
    for each in left_out:
        best = told[kinds.index(_without_numbers(each.plan))]
        assert best is found.chosen or best.step.seconds <= each.step.seconds  # type: ignore[union-attr]


def _without_numbers(plan: Plan) -> Plan:
    return plan.but(ram_budget=None, weight_ram_budget=None)


def test_memory_that_is_left_holds_states() -> None:
    left = 4 * G
    host = 2 * UNITS * G + left
    for machine, conditions in ((CPU, HERE), (CUDA, AWAY)):
        slow = replace(machine, disk=replace(DISK, mixed=G / 4, write=G / 4))
        budget = Budget(device=0 if machine is CPU else None, host=host)
        request = PlanRequest(SIZES, budget, conditions, batch=BATCH, machine=slow)
        found = search(request)
        plan = found.chosen.plan
        assert plan.states == Tier.DISK
        held = bytes_of(plan, SIZES, conditions)[Tier.HOST]
        assert host - (64 << 20) < held <= host  # whole chunks
        alone = search(replace(request, spend=False)).chosen
        assert alone.plan.ram_budget is None
        assert found.chosen.step is not None
        assert alone.step is not None
        assert found.chosen.step.seconds < alone.step.seconds


def test_in_memory_nothing_is_gained_beside_the_same_cores() -> None:
    found = search(PlanRequest(SIZES, Budget(), HERE, batch=BATCH, machine=CPU))
    assert found.chosen.plan == Plan(Tier.HOST, Tier.HOST)
    assert len(found.tried) > 4


def test_an_accelerator_has_updates_beside_its_forward() -> None:
    found = search(PlanRequest(SIZES, Budget(), AWAY, batch=BATCH, machine=CUDA))
    assert found.chosen.plan == Plan(Tier.DEVICE, Tier.HOST, overlap="forward")


def test_the_device_updates_where_that_is_faster() -> None:
    request = PlanRequest(SIZES, Budget(), AWAY, batch=BATCH, machine=CUDA, on_device=True)
    found = search(request)
    assert (found.chosen.plan.update_on, found.chosen.plan.overlap) == ("hybrid", "auto")
    tried = {(e.plan.update_on, e.plan.optimizer_overlap) for e in found.tried}
    assert tried >= {("device", "none"), ("device", "backward"), ("hybrid", "backward")}
    assert {e.plan.parameters for e in found.tried if e.plan.update_on} == {Tier.DEVICE}
    assert not any(e.plan.update_on for e in search(replace(request, on_device=False)).tried)
    unknown = replace(CUDA, profile=PROFILE.but(device_update={}))
    assert not any(e.plan.update_on for e in search(replace(request, machine=unknown)).tried)
    assert {e.plan.update_on for e in search(replace(request, update_on="host")).tried} == {"host"}
    there = search(replace(request, update_on="device", budget=Budget(device=4 * UNITS * G)))
    assert {(e.plan.parameters, e.plan.update_on) for e in there.tried} == {(Tier.DEVICE, "device")}
    assert {e.plan.optimizer_overlap for e in there.tried} == {"none", "backward"}


def units_above(plan: Plan) -> int:
    return [plan.tier_of(str(n)) for n in range(UNITS)].count(Tier.HOST)


def test_as_many_units_as_fit_are_above_the_disk() -> None:
    last = -1
    for host in range(9 * G, 20 * G, G):
        request = PlanRequest(SIZES, Budget(host=host), HERE, Plan(states=Tier.DISK))
        request = replace(request, conditions=replace(HERE, states=Tier.DISK), overlap="backward")
        plan = search(request).chosen.plan
        assert bytes_of(plan, SIZES, HERE)[Tier.HOST] <= host
        count = units_above(plan)
        assert count >= last
        if 0 < count < UNITS - 1:
            more = plan.but(
                parameters="disk",
                parameter_units={str(n): Tier.HOST for n in range(count + 1)},
                weight_ram_budget=least_in_memory([G] * (UNITS - count - 1)),
            )
            assert bytes_of(more, SIZES, HERE)[Tier.HOST] > host
            assert plan.tier_of("0") == Tier.HOST  # whose gradients land last
        last = count
    assert last == UNITS


def test_units_are_between_device_and_host() -> None:
    whole = bytes_of(Plan(Tier.DEVICE), SIZES, AWAY)[Tier.DEVICE]
    below = bytes_of(Plan(Tier.HOST), SIZES, AWAY)[Tier.DEVICE]
    assert below < whole
    plans = [
        search(PlanRequest(SIZES, Budget(device=n), AWAY)).chosen.plan for n in (below, whole - 1)
    ]
    few, most = (sum(p.tier_of(str(n)) == Tier.DEVICE for n in range(UNITS)) for p in plans)
    assert 0 == few < most < UNITS
    assert len(plans[1].parameter_units) == min(most, UNITS - most)  # what is said is the shorter


def test_formats_that_round_are_taken_where_they_are_allowed_alone() -> None:
    request = PlanRequest(SIZES, Budget(host=2 * UNITS * G + 6 * G, disk=0), HERE)
    with pytest.raises(BudgetError):
        search(request)
    found = search(replace(request, formats=(StateFormat.BF16, StateFormat.INT8)))
    assert found.chosen.conditions.state_format == StateFormat.INT8
    assert bytes_of(found.chosen.plan, SIZES, found.chosen.conditions)[Tier.HOST] <= 26 * G
    assert {e.conditions.state_format for e in found.tried} == {None, "bf16", "int8"}
    roomy = search(replace(request, budget=Budget(), formats=(StateFormat.INT8,)))
    assert roomy.chosen.conditions.state_format is None


def test_a_batch_is_cut_where_its_activations_do_not_fit() -> None:
    held = replace(HERE, activations=HeldActivations(8 * G, 8 * G))
    halves = MicroBatch(BATCH.tokens // 2, BATCH.flops // 2)
    split = MicroBatching(2, halves, HeldActivations(4 * G, 4 * G))
    request = PlanRequest(
        SIZES, Budget(host=HOST_BYTES + 4 * G, disk=0), held, batch=BATCH, machine=CPU
    )
    with pytest.raises(BudgetError):
        search(replace(request, overlap="none"))
    found = search(replace(request, micro_batchings=(split,)))
    assert found.chosen.plan == Plan(Tier.HOST, Tier.HOST, accumulation_steps=2)
    assert found.chosen.batch == halves
    assert found.chosen.step is not None
    assert found.chosen.step.compute == pytest.approx(30)
    both = search(replace(request, budget=Budget(), micro_batchings=(split,)))
    again = [e.plan for e in both.tried if e.plan.accumulation_steps == 2]
    assert again == []  # everything fits without


def _less_kept(held: int, saved: int) -> tuple[MicroBatching, ...]:
    again = MicroBatch(BATCH.tokens, 4 * BATCH.flops // 3)
    away = HeldActivations(held, held, saved, G // 4)
    return (
        MicroBatching(1, again, HeldActivations(2 * held, 2 * held), ActivationPlacement.RECOMPUTE),
        MicroBatching(1, BATCH, away, ActivationPlacement.DISK),
    )


def test_activations_go_where_that_is_fastest() -> None:
    kept = replace(HERE, states=Tier.HOST, activations=HeldActivations(8 * G, 8 * G))
    request = PlanRequest(
        SIZES,
        Budget(host=HOST_BYTES + 4 * G),
        kept,
        batch=BATCH,
        machine=CPU,
        overlap="none",
        micro_batchings=_less_kept(G, 6 * G),
    )
    # Written and read in less than 3 + 1.5 s beside 30 s of computing; or computed again in 10 s.
    found = search(request)
    assert found.chosen.plan == Plan(overlap="none", activations="disk")
    slow = replace(CPU, disk=replace(DISK, read=G / 10, write=G / 10))
    assert search(replace(request, machine=slow)).chosen.plan.activations == "recompute"
    unlimited = search(replace(request, budget=Budget()))
    assert unlimited.chosen.plan == Plan(overlap="none")
    assert {each.plan.activations for each in unlimited.tried} == {"keep"}
    assert search(replace(request, machine=None)).chosen.plan.activations == "recompute"


SLOW_LINK = replace(CUDA, profile=PROFILE.but(link=LinkRates(2 * G, 2 * G, 3 * G)))
BLOCKS = Sizes(
    (
        UnitSizes("root", 3 * G, 3 * G, 2 * ((torch.float32, 3 * G // 8),)),
        *(UnitSizes(str(n), G, G, ((torch.float32, G // 4),)) for n in range(4)),
    )
)
"""Blocks, and a larger unit around them."""


CHOSEN: tuple[Overlap, ...] = ("none", "forward", "backward")
"""Overlaps that a search chooses from."""


def every_placement(conditions: Conditions) -> Iterator[Plan]:
    """Yield every choice of units on the tiers, of states and of overlap."""
    tiers = [Tier.HOST, Tier.DISK] if conditions.device_is_host else list(Tier)
    blocks = [unit.name for unit in BLOCKS.units[1:]]
    for placed in combinations_with_replacement(tiers, len(blocks)):
        for root in tiers:
            units = {**dict(zip(blocks, placed, strict=True)), "root": root}
            for states, overlap in product((Tier.HOST, Tier.DISK), CHOSEN):
                if not (Tier.DISK in units.values() and overlap == "forward"):
                    yield Plan(
                        parameter_units=units, parameters=root, states=states, overlap=overlap
                    )


@pytest.mark.parametrize(("host", "disk"), list(product((4, 9, 14, 18, 24), (9, 22))))
def test_a_search_finds_what_trying_everything_finds(host: int, disk: int) -> None:
    compare_with_everything(HERE, Budget(host=host * G, disk=disk * G), CPU)


@crossed(
    device=(10, 12, 16), host=(10, 12, 15, 20), disk=(15, 30), machine=(CUDA, SLOW_LINK), meet=3
)
def test_a_search_for_a_device_finds_what_trying_everything_finds(
    device: int, host: int, disk: int, machine: MachineRates
) -> None:
    compare_with_everything(AWAY, Budget(device * G, host * G, disk * G), machine)


def compare_with_everything(conditions: Conditions, budget: Budget, machine: MachineRates) -> None:
    best: dict[bool, float] = {}
    for plan in every_placement(conditions):
        fitted = fit(plan, BLOCKS, budget, conditions)
        if isinstance(fitted, Plan):
            seconds = time_of(fitted, BLOCKS, conditions, BATCH, machine).seconds
            beside = plan.overlap == "backward"
            best[beside] = min(best.get(beside, seconds), seconds)
    request = PlanRequest(BLOCKS, budget, conditions, batch=BATCH, machine=machine, spend=False)
    if not best:
        with pytest.raises(BudgetError):
            search(request)
        return
    chosen = search(request).chosen
    assert isinstance(fit(chosen.plan, BLOCKS, budget, conditions), Plan)
    assert chosen.step is not None
    assert (chosen.plan.overlap == "backward") == (False not in best)
    assert 0.98 * chosen.step.seconds <= best[min(best)]  # beside backward if nothing else fits
    search(replace(request, machine=None))


def test_units_are_on_three_tiers_where_two_are_slower() -> None:
    """All that is beside the device does not fit the host, and the link is as slow as the disk."""
    budget = Budget(device=8 * G, host=20 * G)
    batch = MicroBatch(100, 10**12)
    request = PlanRequest(
        SIZES, budget, AWAY, overlap="none", spend=False, batch=batch, machine=SLOW_LINK
    )
    found = search(request)
    there = [found.chosen.plan.tier_of(unit.name) for unit in SIZES.units]
    assert set(there) == set(Tier)
    assert isinstance(fit(found.chosen.plan, SIZES, budget, AWAY), Plan)
    two = [e for e in found.tried if len(e.plan.parameter_tiers) == 2]
    seconds = [each.step.seconds for each in two if each.step is not None]
    assert found.chosen.step is not None
    assert seconds
    assert found.chosen.step.seconds < 0.99 * min(seconds)


def test_a_chosen_plan_is_never_over_budget_and_nothing_faster_was_free() -> None:
    for part in range(2, 9):
        budget = Budget(host=part * HOST_BYTES // 8)
        request = PlanRequest(SIZES, budget, HERE, batch=BATCH, machine=CPU)
        found = search(request)
        chosen = found.chosen
        assert bytes_of(chosen.plan, SIZES, HERE)[Tier.HOST] <= part * HOST_BYTES // 8
        rest = [e for e in found.tried if e.step is not None and e.plan.overlap != "backward"]
        if rest:
            assert chosen.step is not None
            assert chosen.step.seconds <= min(e.step.seconds for e in rest if e.step) / 0.98


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_what_the_user_says_stays(overlap: Overlap) -> None:
    base = Plan(accumulation_steps=4, stage=3, replicas=2)
    request = PlanRequest(SIZES, Budget(), HERE, base, overlap, BATCH, CPU)
    for plan in candidates(request):
        assert plan.overlap == overlap
        assert (plan.accumulation_steps, plan.replicas) == (4, 2)
    assert {each.plan.overlap for each in search(request).tried} == {overlap}


def test_a_rate_that_is_lacking_leaves_the_search_to_bytes() -> None:
    request = PlanRequest(SIZES, Budget(), HERE, batch=BATCH)
    timed, lacking = search_by_rates(request, CPU)
    assert timed.chosen.step is not None
    assert lacking is None
    unmeasured = replace(CPU, profile=PROFILE.but(update={}))
    by_bytes, lacking = search_by_rates(request, unmeasured)
    assert by_bytes == search(request) == search_by_rates(request, None)[0]
    assert "no rate of updates of float32/fp32" in str(lacking)


def test_a_disk_that_was_not_measured_leaves_seconds_out() -> None:
    request = PlanRequest(SIZES, Budget(host=HOST_BYTES - 1), HERE, batch=BATCH)
    found = search(replace(request, machine=replace(CPU, disk=None)))
    assert found.chosen.plan.states == Tier.DISK
    assert found.chosen.step is None


def test_the_smallest_change_fits_and_nothing_less() -> None:
    request = PlanRequest(SIZES, Budget(host=HOST_BYTES // 2, disk=0), HERE)
    with pytest.raises(BudgetError, match="smallest change") as caught:
        search(request)
    named = str(caught.value).split("in bytes: ")[1].split(";")[0].split(" and ")
    least = {tier: int(n.split()[0]) for tier, n in (each.split("=") for each in named)}
    raised = {"host": HOST_BYTES // 2, "disk": 0} | least
    search(replace(request, budget=Budget(**raised)))
    for tier in least:
        with pytest.raises(BudgetError):
            search(replace(request, budget=Budget(**{**raised, tier: raised[tier] - 1})))


def test_which_plans_use_the_disk() -> None:
    assert not uses_disk(Plan())
    assert uses_disk(Plan(states=Tier.DISK))
    assert uses_disk(Plan(parameter_units={"a": Tier.DISK}))


def test_a_faster_disk_is_never_slower() -> None:
    last = float("inf")
    for factor in (1, 2, 4, 8, 16):
        disk = DirectoryRates(DISK.read * factor, DISK.write * factor, DISK.mixed * factor, 1, 1)
        request = PlanRequest(
            SIZES, Budget(host=8 * G), HERE, batch=BATCH, machine=replace(CPU, disk=disk)
        )
        found = search(request).chosen
        assert found.step is not None
        assert found.step.seconds <= last
        last = found.step.seconds
