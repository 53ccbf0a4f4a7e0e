"""plan="auto": the first placement that a budget holds, and what is short where none does."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tensorstow import AdamW, Budget, Plan, Tier, stow
from tensorstow.base.errors import BudgetError
from tensorstow.fsdp import auto
from tensorstow.fsdp.auto import RING_BYTES, Sizes, auto_plan, bytes_of
from tensorstow.fsdp.d2h_queue import MAX_IN_FLIGHT_BYTES
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.fsdp.units import units_of
from tensorstow.io.files import ALIGN
from tensorstow.step import schedules as schedule
from tensorstow.step.backpressure import WINDOW_BYTES

G = 1 << 30
SIZES = Sizes(100 * G, gradients=100 * G, states=200 * G, largest_unit=10 * G, largest_share=10 * G)
POOLED = 30 * G + 3 * ALIGN
"""Of HOST: three units of parameters on DISK."""
DEVICE = 120 * G + MAX_IN_FLIGHT_BYTES
"""Parameters, two units gathered, and gradients on their way down."""
LESS = 200 * G + RING_BYTES
"""Of HOST: parameters and gradients, with states on DISK."""


def _placed(budget: Budget, *, device_is_host: bool = False) -> tuple[Tier, Tier]:
    plan = auto_plan(SIZES, budget, device_is_host=device_is_host)
    return plan.parameters, plan.states


def test_everything_is_as_high_as_it_fits() -> None:
    assert _placed(Budget()) == (Tier.DEVICE, Tier.HOST)
    assert _placed(Budget(device=DEVICE, host=400 * G)) == (Tier.DEVICE, Tier.HOST)
    assert _placed(Budget(device=DEVICE, host=LESS)) == (Tier.DEVICE, Tier.DISK)
    assert _placed(Budget(device=DEVICE - 1)) == (Tier.HOST, Tier.HOST)
    assert _placed(Budget(device=51 * G, host=400 * G)) == (Tier.HOST, Tier.HOST)
    assert _placed(Budget(device=51 * G, host=LESS)) == (Tier.HOST, Tier.DISK)
    assert _placed(Budget(device=51 * G, host=LESS - 1)) == (Tier.DISK, Tier.DISK)


def test_gradients_that_do_not_fit_are_used_beside_backward() -> None:
    roomy = 100 * G + POOLED + RING_BYTES
    tight = 10 * G + WINDOW_BYTES + POOLED + RING_BYTES
    assert auto_plan(SIZES, Budget(host=roomy), device_is_host=True).overlap == "none"
    assert auto_plan(SIZES, Budget(host=tight), device_is_host=True).overlap == "backward"
    with pytest.raises(BudgetError, match=r"1 B of HOST"):
        auto_plan(SIZES, Budget(host=tight - 1), device_is_host=True)


def test_shelves_have_what_the_budget_leaves() -> None:
    least = 100 * G + POOLED + RING_BYTES
    for host, pool_bytes in (
        (least, POOLED),
        (least + 7, POOLED + 7),
        (least + 50 * G, POOLED + 2 * (10 * G + ALIGN)),  # two are fetched ahead
    ):
        plan = auto_plan(SIZES, Budget(host=host), device_is_host=True)
        assert (plan.parameters, plan.buffer_pool_bytes) == (Tier.DISK, pool_bytes)


class Deep(nn.Module):
    """Blocks of a MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_a_run_holds_no_more_than_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (auto, schedule):
        monkeypatch.setattr(module, "WINDOW_BYTES", 2 << 20)
    budget = RING_BYTES + (7 << 20)  # the window and a unit of gradients, three units, some more
    model, optimizer = stow(Deep(), partial(AdamW, lr=1e-3), budget=Budget(host=budget))
    for _ in range(3):
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    memory, lent = optimizer.memory(), parameter_bytes(model).most_buffer_pool_bytes
    optimizer.close()
    assert lent > 3 << 20  # the sum below is of a run whose parameters are on disk
    assert memory.ring_bytes + memory.gradient_bytes + lent <= budget


def test_commits_take_their_room_on_disk() -> None:
    committed = 2 * (100 + 200) * G
    for states in (Tier.HOST, Tier.DISK):
        enough, short = Budget(disk=committed), Budget(disk=committed - 1)
        auto_plan(SIZES, enough, device_is_host=True, states=states, commits=True)
        with pytest.raises(BudgetError, match=r"of DISK"):
            auto_plan(SIZES, short, device_is_host=True, states=states, commits=True)


@pytest.mark.parametrize("states", ["host", "ram", "disk"])
def test_a_run_that_commits_stays_within_its_disk(states: str, tmp_path: Path) -> None:
    make = partial(AdamW, lr=1e-3, states=states)
    nbytes = sum(p.nbytes for p in Deep().parameters())
    with pytest.raises(BudgetError, match="of DISK"):
        stow(Deep(), make, budget=Budget(disk=5 * nbytes), dir=tmp_path)
    model, optimizer = stow(Deep(), make, budget=Budget(disk=6 * nbytes), dir=tmp_path)
    for _ in range(3):
        model(torch.randn(2, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.commit()
    optimizer.close()
    held = sum(file.stat().st_blocks * 512 for file in tmp_path.rglob("*"))
    assert 3 * nbytes < held < 6.5 * nbytes  # files grow by steps


def test_the_cpu_is_device_and_host() -> None:
    assert _placed(Budget(), device_is_host=True) == (Tier.HOST, Tier.HOST)
    assert _placed(Budget(host=LESS), device_is_host=True) == (Tier.HOST, Tier.DISK)


def test_what_is_short_is_said() -> None:
    with pytest.raises(BudgetError, match=r"50\.0 GiB of DEVICE"):
        auto_plan(SIZES, Budget(device=0), device_is_host=False)
    with pytest.raises(BudgetError, match=r"300\.0 GiB of DISK"):
        auto_plan(SIZES, Budget(disk=0, host=LESS - 1), device_is_host=True)


def test_sizes_are_a_ranks_share() -> None:
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    assert Sizes.of(units_of(model), 2) == Sizes(64, 64, 320, 128, 128)
    model.weight.requires_grad = False
    assert Sizes.of(units_of(model), 1) == Sizes(128, 0, 0, 128, 128)


@pytest.mark.parametrize("parameters", [Tier.HOST, Tier.DISK])
def test_what_weights_pass_through_counts_where_the_device_has_memory(parameters: Tier) -> None:
    plan = Plan(parameters=parameters, states=parameters)
    here = bytes_of(plan, SIZES, device_is_host=True)
    away = bytes_of(plan, SIZES, device_is_host=False)
    assert away[Tier.DEVICE] == (20 + 30) * G + MAX_IN_FLIGHT_BYTES
    assert away[Tier.HOST] - here[Tier.HOST] == (30 * G if parameters == Tier.DISK else 0)


def test_mirrors_count_where_parameters_are_on_the_device() -> None:
    plan = auto_plan(SIZES, Budget(), device_is_host=False)
    held = bytes_of(plan, SIZES, device_is_host=False)
    assert held == {Tier.DEVICE: DEVICE, Tier.HOST: 400 * G, Tier.DISK: 0}
