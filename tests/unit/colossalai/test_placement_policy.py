from itertools import combinations

import pytest
import torch
from torch import nn

from tensorstow.base.plan import Plan
from tensorstow.base.tiers import Tier
from tensorstow.colossalai.booster.plugin.place_model import PlacementRequest
from tensorstow.colossalai.booster.plugin.placement_policy import (
    CONST_BYTES,
    PlacementPolicy,
    nearest,
    plan_of,
    states_off_device,
)
from tensorstow.fsdp.units import units_of
from tensorstow.planner.sizes import Sizes, UnitSizes

MIB = 1 << 20


def units(*sizes: int) -> list[UnitSizes]:
    return [UnitSizes(str(i), n, n, ((torch.float32, n // 4),)) for i, n in enumerate(sizes)]


@pytest.mark.parametrize(
    ("sizes", "fraction", "chosen"),
    [
        ((10, 10, 10, 10), 0.0, set()),
        ((10, 10, 10, 10), 0.5, {"0", "1"}),
        ((10, 10, 10, 10), 0.6, {"0", "1"}),
        ((10, 10, 10, 10), 0.7, {"0", "1", "2"}),
        ((10, 10, 10, 10), 1.0, {"0", "1", "2", "3"}),
        ((1, 100, 50, 49), 0.5, {"1"}),
        ((1, 100, 50, 49), 0.255, {"2", "0"}),
    ],
)
def test_the_units_nearest_to_a_fraction(
    sizes: tuple[int, ...], fraction: float, chosen: set[str]
) -> None:
    shares = {unit.name: unit.share_bytes for unit in units(*sizes)}
    assert nearest(shares, fraction * sum(sizes)) == chosen


def plan(
    policy: PlacementPolicy,
    *sizes: int,
    states: Tier = Tier.HOST,
    device_is_host: bool = False,
    **given: int,
) -> Plan:
    asked = PlacementRequest((), Sizes(tuple(units(*sizes))), states, device_is_host)
    return plan_of(policy, asked, **given)


@pytest.mark.parametrize(
    ("policy", "tier", "below", "stage"),
    [
        (PlacementPolicy(), Tier.DEVICE, set(), 3),
        (PlacementPolicy("cuda"), Tier.DEVICE, set(), 3),
        (PlacementPolicy(shard_param=0.0), Tier.DEVICE, set(), 2),
        (PlacementPolicy(offload_param=0.5, offload_optim=0.5), Tier.DEVICE, {"0"}, 3),
        (PlacementPolicy("cpu"), Tier.HOST, set(), 3),
        (PlacementPolicy("const"), Tier.HOST, set(), 3),
        (PlacementPolicy("auto"), Tier.HOST, set(), 3),
    ],
)
def test_policies_are_plans(
    policy: PlacementPolicy, tier: Tier, below: set[str], stage: int
) -> None:
    made = plan(policy, 10, 10)
    assert (made.parameters, set(made.parameter_units), made.stage) == (tier, below, stage)
    assert set(made.parameter_units.values()) <= {Tier.HOST}
    on_cpu = plan(policy, 10, 10, device_is_host=True)
    assert (on_cpu.parameters, on_cpu.parameter_units) == (Tier.HOST, {})


@pytest.mark.parametrize(
    ("sizes", "prefetch"),
    [
        ((100 * MIB,) * 20, 4),
        ((100 * MIB,) * 3, 3),
        ((600 * MIB,) * 3, 0),
    ],
)
def test_const_bounds_what_is_on_its_way(sizes: tuple[int, ...], prefetch: int) -> None:
    made = plan(PlacementPolicy("const"), *sizes)
    assert made.prefetch == prefetch
    assert prefetch == 0 or (prefetch + 1) * max(sizes) <= max(CONST_BYTES, 4 * max(sizes))


@pytest.mark.parametrize(
    ("fraction", "unsharded"),
    [(1.0, ()), (0.5, ("0", "1")), (0.7, ("0",)), (0.01, ("0", "1", "2", "3"))],
)
def test_a_fraction_is_sharded_between_forward_and_backward(
    fraction: float, unsharded: tuple[str, ...]
) -> None:
    made = plan(PlacementPolicy(shard_param=fraction), 10, 10, 10, 10)
    assert (made.stage, made.unsharded) == (3, unsharded)


@pytest.mark.parametrize("here", [False, True])
def test_auto_lets_copies_stay_on_the_device(*, here: bool) -> None:
    auto = PlacementPolicy("auto")
    made = plan(auto, 10, 100, 50, device_is_host=here, device_budget=70_000)
    assert made.parameters == Tier.HOST
    assert not made.parameter_units
    assert made.device_budget == (None if here else 70_000)


def test_max_prefetch_is_the_plan_s() -> None:
    made = plan(PlacementPolicy("cpu"), 10, 10, states=Tier.DISK, replicas=2, prefetch=5)
    assert (made.prefetch, made.replicas, made.states) == (5, 2, Tier.DISK)


@pytest.mark.parametrize(
    ("fraction", "below", "chosen"),
    [
        (0.0, (), set()),
        (0.5, (), {"1.weight"}),
        (1.0, (), {"1.weight", "2.weight", "3.weight"}),
        (0.5, ("2",), {"2.weight", "3.weight"}),
        (0.25, ("2",), {"2.weight"}),
        (0.0, ("0",), set()),  # which is frozen: it has no states
    ],
)
def test_fractions_of_states_are_of_what_is_trained(
    fraction: float, below: tuple[str, ...], chosen: set[str]
) -> None:
    model = nn.Sequential(*(nn.Linear(8, n, bias=False) for n in (64, 16, 8, 8)))
    model[0].weight.requires_grad_(False)  # noqa: FBT003
    each = units_of(model, list(model))
    made = Plan(parameters=Tier.DEVICE, parameter_units=dict.fromkeys(below, Tier.HOST))
    assert states_off_device(PlacementPolicy(offload_optim=fraction), each, made) == chosen


def test_what_is_nearest_is_found_where_taking_the_largest_first_misses_it() -> None:
    assert nearest({"a": 6, "b": 5, "c": 5}, 10) == {"b", "c"}
    sizes = {"a": 97, "b": 61, "c": 43, "d": 23, "e": 11, "f": 0}
    sums = [sum(each) for n in range(6) for each in combinations(sizes.values(), n)]
    for wanted in range(-1, 250, 7):
        found = sum(sizes[name] for name in nearest(sizes, wanted))
        assert abs(found - wanted) == min(abs(each - wanted) for each in sums)


def test_units_ahead_are_as_many_as_were_asked_for() -> None:
    made = [plan(PlacementPolicy("const"), 8, 8, 8, prefetch=n) for n in (0, 1)]
    assert [each.prefetch for each in made] == [3, 1]
