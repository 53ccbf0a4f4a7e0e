"""``plan="auto"``: the machine as budget, by its rates; what it says, and ``plan_of``."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorstow
from machines import DISK, PROFILE, G
from ranks.pool import Pool
from ranks.stowed import model_of
from tensorstow import AdamW, Budget, Plan, Tier, stow
from tensorstow.base import notices
from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.base.mounts import Mount
from tensorstow.base.profile import identify_machine, write_profile
from tensorstow.fsdp import automatic, read_only
from tensorstow.fsdp.automatic import free_host_bytes, machine_budget, total_host_bytes
from tensorstow.fsdp.units import units_of
from tensorstow.planner.headroom import Headroom, usual_headroom

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def model() -> nn.Module:
    """Return 32 MiB, whose states are more than the ring that they pass through on disk."""
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))


BYTES = 32 << 20


def placed(**given: object) -> tuple[Plan, nn.Module]:
    stowed, optimizer = stow(model(), partial(AdamW, lr=1e-3), **given)  # type: ignore[arg-type]
    stowed(torch.randn(2, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.close()
    return tensorstow.plan_of(stowed), stowed


@pytest.mark.parametrize(
    ("plan", "optimizer", "overlap"),
    [
        (Plan(), AdamW, "none"),
        (Plan(states="disk"), AdamW, "none"),
        (Plan(parameters="disk"), AdamW, "forward"),
        (Plan(parameter_units={"blocks.1": "disk"}, states="disk"), AdamW, "forward"),
        (Plan(parameters="disk", overlap="none"), AdamW, "none"),
        (Plan(parameters="disk", overlap="backward"), AdamW, "backward"),
        (Plan(parameters="disk"), partial(AdamW, overlap="backward"), "backward"),
        (Plan(parameters="disk"), partial(AdamW, overlap="none"), "none"),
        (Plan(), partial(AdamW, overlap="forward"), "forward"),
    ],
)
def test_updates_of_weights_that_are_read_before_use_run_in_forward(
    plan: Plan,
    optimizer: Callable[..., Any],
    overlap: str,
) -> None:
    model, placed = tensorstow.stow(model_of(torch.float32), optimizer, plan=plan)
    assert placed.offload_policy.overlap == overlap
    assert tensorstow.plan_of(model).optimizer_overlap == overlap
    placed.close()


def test_a_factory_without_the_keyword_updates_in_step() -> None:
    def make(named: Any, *, states: str = "host", module: Any = None) -> Any:  # noqa: ANN401
        return AdamW(named, states=states, module=module)

    _, placed = tensorstow.stow(model_of(torch.float32), make, plan=Plan(parameters="disk"))
    assert placed.offload_policy.overlap == "none"
    placed.close()


def test_plan_of_is_what_a_model_was_placed_by() -> None:
    assert placed()[0] == Plan(Tier.HOST, Tier.HOST)
    given = Plan(states="disk", overlap="backward")
    assert placed(plan=given)[0] == given
    with pytest.raises(OptionError, match="did not place"):
        tensorstow.plan_of(model())


@pytest.mark.parametrize(("module", "optimizer"), [(automatic, AdamW), (read_only, None)])
def test_rank_0_alone_shows_what_was_chosen(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, optimizer: type[AdamW] | None
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(notices, "show", shown.append)
    stow(nn.Linear(2, 2), optimizer)
    assert len(shown) == 1
    assert shown[0].startswith('plan="auto"')
    assert "\n" not in shown[0]
    monkeypatch.setattr(module, "rank_here", lambda: 1)
    stow(nn.Linear(2, 2), optimizer)
    assert len(shown) == 1


def test_one_table_says_what_was_chosen_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    placed(budget=Budget(host=4 * BYTES - 1))
    (table,) = [r.getMessage() for r in caplog.records if "chose" in r.getMessage()]
    assert "chose parameters=host, states=disk, overlap=auto, within the memory given:" in table
    assert "not parameters=host, states=host, overlap=auto: 1 B of HOST short" in table
    assert "activations on host are not counted without batch=: let budget= leave room" in table
    assert "tensorstow calibrate" in caplog.text


@pytest.fixture
def _no_headroom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all that is free be the budget: the models here are smaller than any headroom."""
    none = dict.fromkeys(Tier, Headroom())
    monkeypatch.setattr(automatic, "usual_headroom", lambda **_: none)


@pytest.mark.usefixtures("_no_headroom")
def test_the_machine_is_the_budget_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automatic, "free_host_bytes", lambda: 2 * 4 * BYTES - BYTES)
    assert placed()[0].states == Tier.HOST
    monkeypatch.setattr(automatic, "free_host_bytes", lambda: 2 * 4 * BYTES - BYTES - 2)
    assert placed()[0].states == Tier.DISK
    monkeypatch.setattr(automatic, "free_host_bytes", lambda: 1 << 10)
    with pytest.raises(BudgetError, match="smallest change"):
        placed()
    assert placed(budget=Budget())[0].states == Tier.HOST  # no limit


def test_tokens_say_how_long_computing_takes() -> None:
    slow = replace(DISK, read=1e9, write=1e9, mixed=1e9)
    write_profile(PROFILE.but(machine=identify_machine(), directories={"/": slow}))
    budget = Budget(host=4 * BYTES - 1)
    assert [placed(budget=budget, tokens=n)[0].optimizer_overlap for n in (1, 2048)] == [
        "none",
        "forward",
    ]
    for tokens in (0, 1.5, True):
        with pytest.raises(OptionError, match="tokens="):
            placed(tokens=tokens)
    with pytest.raises(OptionError, match="tokens= only applies"):
        placed(plan=Plan(), tokens=1)


def test_the_format_that_the_optimizer_is_told_counts() -> None:
    told = partial(AdamW, lr=1e-3, state_format="int8")
    stowed, optimizer = stow(model(), told, budget=Budget(host=3 * BYTES))
    optimizer.close()
    assert tensorstow.plan_of(stowed) == Plan(Tier.HOST, Tier.HOST)


def test_variants_that_gain_little_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    slow = replace(DISK, read=1e9, write=1e9, mixed=1e9)
    write_profile(PROFILE.but(machine=identify_machine(), directories={"/": slow}))
    _, optimizer = stow(model(), partial(AdamW, lr=1e-3), budget=Budget(host=7 * BYTES))
    optimizer.close()
    (table,) = [r.getMessage() for r in caplog.records if "chose" in r.getMessage()]
    assert table.endswith(" variants of these that gain less than 2%")


def test_rates_choose_the_overlap() -> None:
    slow = replace(DISK, read=1e9, write=1e9, mixed=1e9)  # about what computing takes
    write_profile(PROFILE.but(machine=identify_machine(), directories={"/": slow}))
    budget = Budget(host=4 * BYTES - 1)
    assert placed(budget=budget)[0].overlap == "forward"
    told = partial(AdamW, lr=1e-3, overlap="none")
    stowed, optimizer = stow(model(), told, budget=budget)
    optimizer.close()
    assert tensorstow.plan_of(stowed).overlap == "none"
    assert tensorstow.plan_of(stowed).states == Tier.DISK
    # The default in words leaves the choice to the search, as the default does.
    stowed, optimizer = stow(model(), partial(AdamW, lr=1e-3, overlap="auto"), budget=budget)
    optimizer.close()
    assert tensorstow.plan_of(stowed).overlap == "forward"


def test_a_profile_without_the_rates_that_are_needed_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="tensorstow")
    write_profile(PROFILE.but(machine=identify_machine(), update={}))
    assert placed()[0] == Plan(Tier.HOST, Tier.HOST)
    assert "looks at bytes only: The profile has no rate of updates" in caplog.text


def test_accumulation_that_the_optimizer_is_told_counts() -> None:
    told = partial(AdamW, lr=1e-3, overlap="backward", accumulation_steps=2)
    stowed, optimizer = stow(model(), told)
    optimizer.close()
    plan = tensorstow.plan_of(stowed)
    assert (plan.overlap, plan.accumulation_steps) == ("backward", 2)


def test_free_memory_is_the_systems_and_the_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:   40 kB\n")
    monkeypatch.setattr(automatic, "_MEMINFO", meminfo)
    monkeypatch.setattr(automatic, "_CGROUP", tmp_path)
    assert free_host_bytes() == 40 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert free_host_bytes() == 40 << 10
    (tmp_path / "memory.max").write_text("30000\n")
    assert free_host_bytes() == 29995
    assert total_host_bytes() == 30000
    meminfo.unlink()
    (tmp_path / "memory.max").unlink()
    assert free_host_bytes() > 0
    assert total_host_bytes() > free_host_bytes()


def test_a_machines_budget_leaves_the_headroom_free_that_plan_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "free_host_bytes", lambda: 100 * G)
    room = usual_headroom(device_is_host=True)[Tier.HOST]
    counted = machine_budget([], CPU, [tmp_path], with_activations=True).host
    assert counted == room.within(100 * G) < 95 * G
    assert machine_budget([], CPU, [tmp_path]).host == room.within(100 * G) // 2


@pytest.mark.usefixtures("_no_headroom")
def test_a_machines_budget_is_a_part_of_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "free_host_bytes", lambda: 100 * G)
    found = machine_budget([], CPU, [tmp_path])
    assert found.host == 50 * G
    assert machine_budget(units_of(model()), CPU, [tmp_path]).host == 50 * G + BYTES // 2
    assert found.device is None
    with monkeypatch.context() as patch:
        patch.setattr(automatic, "local_ranks", lambda: SimpleNamespace(count=4))
        facts = SimpleNamespace(free_bytes=100 * G, mount=Mount("/", "ext4", "a"))
        patch.setattr(automatic, "check_directory", lambda _: facts)
        shared = machine_budget([], CPU, [tmp_path])
    assert (shared.host, shared.disk) == (50 * G // 4, 80 * G // 4)
    assert found.disk > 0  # type: ignore[operator]
    with monkeypatch.context() as patch:
        mounts = {name: Mount("/", "ext4", name[0]) for name in ("a", "a2", "b")}
        free = {n: SimpleNamespace(free_bytes=10 * G, mount=mount) for n, mount in mounts.items()}
        patch.setattr(automatic, "check_directory", lambda path: free[path.name])
        for names, room in ((["a", "b"], 20), (["a", "a2"], 10), (["a", "a2", "b"], 15)):
            disk = machine_budget([], CPU, [Path(name) for name in names]).disk
            assert disk == int(0.8 * room * G)
    assert machine_budget([], CPU, [tmp_path / "to be made"]).disk is None
    assert machine_budget([], CPU, [Path("/dev/shm")]).disk is None  # refused when it is opened


def chosen(least: int) -> str:
    """Return the plan of this rank; the machine of the second one has less memory."""
    torch.manual_seed(0)
    free = least if dist.get_rank() == 1 else 1 << 40
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(automatic, "free_host_bytes", lambda: free)
        try:
            return chosen_here()
        except BudgetError as error:
            return str(error)


def chosen_here() -> str:
    stowed, optimizer = stow(model(), partial(AdamW, lr=1e-3))
    plan = tensorstow.plan_of(stowed)
    optimizer.close()
    return plan.to_json()


def test_ranks_have_the_plan_that_the_smallest_machine_holds(
    ranks: Pool,
) -> None:
    assert [Plan.from_json(p).states for p in ranks(2).run(chosen, 1 << 40)] == 2 * [Tier.HOST]
    first, second = ranks(2).run(chosen, 1 << 10)
    assert "does not fit" in first
    assert first == second
