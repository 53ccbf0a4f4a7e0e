"""A run over two drives of which one is lost: what it says, and what an export elsewhere saves."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tensorstow
from compare import all_equal
from ranks.stowed import groups_of
from tensorstow import AdamW, PipelinePolicy, Plan
from tensorstow.base.errors import StoreFormatError, UnlinkedError

WIDTH = 64
POLICY = PipelinePolicy(chunk_elements=1024)
LOST = pytest.mark.parametrize("lost", ["first", "second"])


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(dtype)


def states_on_disk(net: nn.Module, **given: Any) -> AdamW:  # noqa: ANN401
    return AdamW(net.parameters(), lr=1e-2, states="disk", module=net, policy=POLICY, **given)


def train(net: nn.Module, optimizer: Any, first: int, end: int) -> None:  # noqa: ANN401
    dtype = next(net.parameters()).dtype
    for step in range(first, end):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()


def undisturbed(dtype: torch.dtype, steps: int) -> tuple[nn.Module, dict[str, Any]]:
    net = model(dtype)
    optimizer = states_on_disk(net)
    train(net, optimizer, 0, steps)
    states = optimizer.state_dict()
    return net, states


def drives(tmp_path: Path) -> list[Path]:
    return [tmp_path / "first", tmp_path / "second"]


@LOST
def test_a_run_without_one_of_its_drives_says_which_and_changes_nothing(
    tmp_path: Path, lost: str
) -> None:
    net = model()
    with states_on_disk(net, dir=drives(tmp_path)) as optimizer:
        train(net, optimizer, 0, 3)
        optimizer.snapshot("three")
    (tmp_path / lost).rename(tmp_path / "away")
    with pytest.raises(StoreFormatError) as caught:  # no snapshot helps: it is on both
        states_on_disk(model(), dir=drives(tmp_path))
    assert str(tmp_path / lost) in str(caught.value)
    assert "of run" in str(caught.value)
    if (tmp_path / lost).exists():
        assert [path.name for path in (tmp_path / lost).iterdir()] == ["lock"]
        shutil.rmtree(tmp_path / lost)
    (tmp_path / "away").rename(tmp_path / lost)  # the drive is back
    with states_on_disk(model(), dir=drives(tmp_path)) as again:
        assert again.resume("three") == 3


@LOST
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_export_to_another_drive_survives_with_the_same_bits(
    tmp_path: Path, lost: str, dtype: torch.dtype
) -> None:
    (third := tmp_path / "third").mkdir()
    net = model(dtype)
    with states_on_disk(net, dir=drives(tmp_path)) as optimizer:
        train(net, optimizer, 0, 3)
        tensorstow.save_safetensors(net, third / "weights")
        optimizer.save_safetensors(third / "three.safetensors")
        train(net, optimizer, 3, 5)
    (tmp_path / lost).rename(tmp_path / "away")
    again = model(dtype)
    again.load_state_dict(load_file(third / "weights" / "model.safetensors"))
    [left] = [path for path in drives(tmp_path) if path.exists()]
    with states_on_disk(again, dir=[left / "new", third / "new"]) as optimizer:
        optimizer.load_safetensors(third / "three.safetensors")
        train(again, optimizer, 3, 7)
        want, states = undisturbed(dtype, 7)
        assert all_equal(list(again.parameters()), list(want.parameters()))
        found = optimizer.state_dict()["state"]
        assert found.keys() == states["state"].keys()
        for number, entry in states["state"].items():
            assert all(torch.equal(value, found[number][name]) for name, value in entry.items())


@LOST
def test_a_stowed_model_survives_too(tmp_path: Path, lost: str) -> None:
    (third := tmp_path / "third").mkdir()
    plan = Plan(parameters="disk", states="disk")
    make = partial(groups_of, policy=POLICY)
    net, optimizer = tensorstow.stow(model(), make, plan=plan, dir=drives(tmp_path))
    train(net, optimizer, 0, 3)
    tensorstow.save_safetensors(net, third / "weights")
    optimizer.save_safetensors(third / "three.safetensors")
    train(net, optimizer, 3, 6)
    want = [p.full_tensor().clone() for p in net.parameters()]
    optimizer.close()
    (tmp_path / lost).rename(tmp_path / "away")
    with pytest.raises(StoreFormatError, match="of run"):
        tensorstow.stow(model(), make, plan=plan, dir=drives(tmp_path))
    net, optimizer = tensorstow.stow(
        model(), make, plan=plan, weights=third / "weights", dir=[third / "a", third / "b"]
    )
    optimizer.load_safetensors(third / "three.safetensors")
    train(net, optimizer, 3, 6)
    assert all_equal([p.full_tensor() for p in net.parameters()], want)
    optimizer.close()


def test_a_live_run_whose_drive_is_replaced_moves_to_others(tmp_path: Path) -> None:
    net = model()
    optimizer = states_on_disk(net, dir=drives(tmp_path))
    train(net, optimizer, 0, 3)
    optimizer.commit()
    (tmp_path / "second").rename(tmp_path / "away")
    train(net, optimizer, 3, 4)
    with pytest.raises(UnlinkedError):
        optimizer.commit()
    places = [tmp_path / "third", tmp_path / "fourth"]
    assert optimizer.commit_to(places) == 4
    train(net, optimizer, 4, 5)
    optimizer.close()
    found = model()
    with states_on_disk(found, dir=places) as optimizer:
        assert optimizer.resume() == 5
        want, _ = undisturbed(torch.float32, 5)
        assert all_equal(list(found.parameters()), list(want.parameters()))
