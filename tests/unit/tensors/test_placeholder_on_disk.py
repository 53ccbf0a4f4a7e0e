"""What stands in ``optimizer.state`` for a state on disk: seen, never read as numbers."""

import copy
from pathlib import Path

import pytest
import torch

from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import StateOnDisk


def one(directory: Path, weight: torch.Tensor, **options: object) -> AdamW:
    optimizer = AdamW(
        [weight],
        states="disk",
        dir=directory,
        policy=PipelinePolicy(chunk_elements=4096),
        **options,
    )  # type: ignore[arg-type]
    weight.grad = torch.ones_like(weight)
    return optimizer


@pytest.mark.parametrize("durability", ["none", "commit"])
def test_names_and_shapes_are_there(tmp_path: Path, durability: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(100, 70, dtype=torch.bfloat16))
    optimizer = one(tmp_path, weight, durability=durability, amsgrad=True)
    optimizer.step()
    entry = optimizer.state[weight]
    assert entry.keys() == {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"}
    assert entry["exp_avg"].shape == weight.shape
    assert entry["exp_avg"].dtype == torch.float32
    assert repr(entry["master"]) == "StateOnDisk(shape=(100, 70), dtype=torch.float32)"
    if durability == "commit":
        optimizer.commit()
        optimizer.close()
        optimizer = one(tmp_path, weight, amsgrad=True)
        optimizer.resume()
        assert optimizer.state[weight].keys() == entry.keys()


def test_values_are_refused_by_name(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.zeros(10))
    optimizer = one(tmp_path, weight)
    optimizer.step()
    placeholder = optimizer.state[weight]["exp_avg"]
    assert isinstance(placeholder.to("cpu").detach(), StateOnDisk)
    for use in (torch.norm, torch.Tensor.clone, torch.Tensor.zero_, copy.deepcopy, float):
        with pytest.raises(OptionError, match=r"state_dict\(\)"):
            use(placeholder.sum() if use is float else placeholder)
    with pytest.raises(OptionError, match="stands for a state on disk"):
        optimizer.load_state_dict(
            {**optimizer.state_dict(), "state": {0: dict(optimizer.state[weight])}}
        )
    optimizer.step()


@pytest.mark.parametrize("states", ["ram", "disk"])
def test_a_tensor_put_in_its_place_counts_and_the_others_stay(tmp_path: Path, states: str) -> None:
    weight = torch.nn.Parameter(torch.ones(5000))
    where = {"dir": tmp_path} if states == "disk" else {}
    optimizer = AdamW([weight], states=states, **where)  # type: ignore[arg-type]
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.full((5000,), 3.0)
    seen = optimizer.state_dict()["state"][0]
    assert (seen["exp_avg"] == 3.0).all()
    assert torch.allclose(seen["exp_avg_sq"], torch.tensor(0.25e-3))
    weight.grad.zero_()
    optimizer.step()
    seen = optimizer.state_dict()["state"][0]
    assert torch.allclose(seen["exp_avg"], torch.tensor(3.0 * 0.9))
    assert torch.allclose(seen["exp_avg_sq"], torch.tensor(0.25e-3 * 0.999))
