"""``dir=`` of several drives: each has its share of the weights, the states and the activations."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorstow
from compare import all_equal
from machines import DISK, PROFILE
from ranks.stowed import groups_of
from tensorstow import PipelinePolicy, Plan
from tensorstow.base import profile
from tensorstow.base.errors import OptionError

WIDTH = 96
BLOCKS = 12
PLAN = Plan(parameters="disk", states="disk")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))


def measured(patch: pytest.MonkeyPatch, rates: dict[Path, float]) -> None:
    """Let the directories have these rates."""
    found = {str(path): replace(DISK, mixed=rate) for path, rate in rates.items()}
    patch.setattr(profile, "_drive_of", str)
    patch.setattr(profile, "read_profile", lambda: PROFILE.but(directories=found))


def trained(plan: Plan, steps: int = 3, **options: Any) -> tuple[list[torch.Tensor], Any]:  # noqa: ANN401
    policy = PipelinePolicy(chunk_elements=1024)
    net, optimizer = tensorstow.stow(
        model(), partial(groups_of, policy=policy), plan=plan, **options
    )
    start = optimizer.resume() or 0 if "dir" in options else 0
    for step in range(start, steps):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    weights = [p.full_tensor().clone() for p in net.parameters()]
    return weights, optimizer


def weight_bytes(optimizer: Any) -> list[int]:  # noqa: ANN401
    """Return the bytes of weights by directory."""
    pools = {id(p.pager.pool): p.pager.pool for p in optimizer._params().all()}
    [pool] = pools.values()
    return list(pool._files._ends)


def state_bytes(optimizer: Any) -> list[int]:  # noqa: ANN401
    """Return the bytes of the last commit by directory."""
    store = optimizer._states().storage.store
    given = [0] * len(store.files)
    generations = store._manifest.extents()
    for extent in generations[max(generations)]:
        given[extent.file] += extent.nbytes
    return given


@pytest.mark.parametrize("rates", [(2.0, 1.0), (1.0, 1.0), (1.0, 3.0)])
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_each_drive_has_a_share_by_its_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rates: tuple[float, float], overlap: str
) -> None:
    want, alone = trained(PLAN.but(overlap="none"))
    alone.close()
    drives = [tmp_path / "a", tmp_path / "b"]
    measured(monkeypatch, dict(zip(drives, rates, strict=True)))
    for steps in (2, 3):
        got, optimizer = trained(PLAN.but(overlap=overlap), steps, dir=[*map(str, drives)])
        optimizer.commit()
        for given in (weight_bytes(optimizer), state_bytes(optimizer)):
            wanted = [rate / sum(rates) * sum(given) for rate in rates]
            assert given == pytest.approx(wanted, rel=0.03)
        optimizer.close()
    assert all_equal(got, want)


def test_drives_that_were_not_measured_have_equal_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured(monkeypatch, {tmp_path / "other": 1.0})
    monkeypatch.setattr(profile.Profile, "rates_of", lambda *_: None)
    _, optimizer = trained(PLAN, dir=[tmp_path / "a", tmp_path / "b", tmp_path / "c"])
    given = weight_bytes(optimizer)
    assert given == pytest.approx([sum(given) / 3] * 3, rel=0.03)
    optimizer.close()


def test_scratch_states_and_activations_are_shared_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    measured(monkeypatch, {drives[0]: 2.0, drives[1]: 1.0})
    plan = PLAN.but(activations="disk", activation_ram_budget=0)
    want, alone = trained(PLAN)
    alone.close()
    got, optimizer = trained(plan, dir=drives)
    assert all_equal(got, want)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}
    optimizer.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "empty list"),
        (3, "name a directory, or a list"),
        ([""], "name a directory"),
        (["a", "./a"], "name each directory once"),
    ],
)
def test_what_is_no_directory_is_refused(given: Any, message: str) -> None:  # noqa: ANN401
    with pytest.raises(OptionError, match=message):
        tensorstow.stow(model(), tensorstow.AdamW, plan=PLAN, dir=given)
