"""Uses that cannot work, and what users are told of them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorstow.deepspeed as deepspeed
from tensorstow import AdamW, Plan, stow
from tensorstow.base.errors import (
    BudgetError,
    DTypeError,
    LockedError,
    OptionError,
    StowError,
)
from tensorstow.base.update_on import Overlap
from tensorstow.tensornvme import AsyncFileWriter, DiskOffloader


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(x))


@pytest.mark.parametrize(
    "given",
    [
        {"plan": Plan()},
        {"plan": Plan(parameters="disk")},
        {"plan": Plan(overlap="backward")},
        {"plan": Plan(), "compute_dtype": torch.bfloat16},
    ],
    ids=["whole", "disk", "backward", "cast"],
)
def test_sparse_embeddings_are_refused_before_anything_is_placed(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="words is an Embedding with sparse=True"):
        stow(Embedded(), AdamW, **given)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_a_sparse_gradient_is_told_its_way_out(overlap: Overlap) -> None:
    model = Embedded()
    optimizer = AdamW(model.parameters(), overlap=overlap, module=model)

    def step() -> None:
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    with pytest.raises(DTypeError, match=r"sparse=False, or use torch\.optim\.SparseAdam"):
        step()


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_modules_are_refused_by_stow() -> None:
    with pytest.raises(OptionError, match=r"0\.weight is of a lazy module .* run a forward"):
        stow(nn.Sequential(nn.LazyLinear(3)), AdamW)


class Packed(nn.Parameter):
    """As quantised weights are: bytes, and what unpacks them beside."""


def test_frozen_weights_of_a_class_are_not_sharded() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.packed = Packed(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(OptionError, match="packed is a Packed, and FSDP2 makes a DTensor of it"):
        stow(model, AdamW, plan=Plan(parameters="disk"))
    _, optimizer = stow(model, AdamW, plan=Plan())
    assert type(model.packed) is Packed
    optimizer.close()


def test_what_fsdp2_cannot_shard_for_its_strides() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    with pytest.raises(OptionError, match=r"0\.weight .* is not contiguous, which FSDP2"):
        stow(model, AdamW, plan=Plan(parameters="disk"))
    _, optimizer = stow(model, AdamW, plan=Plan())  # nothing is sharded here
    optimizer.close()


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ("backward", "backward", "which another optimizer updates"),
        ("backward", "none", "Parameter 0 of group 0 is in two optimizers"),
        ("backward", "forward", "in two optimizers"),
        ("forward", "none", "is being updated by another optimizer"),
    ],
)
def test_a_parameter_of_two_optimizers(first: Overlap, second: Overlap, told: str) -> None:
    model = nn.Linear(300, 300)
    one = AdamW(model.parameters(), overlap=first, module=model)
    other = AdamW(model.parameters(), overlap=second, module=model)

    def step() -> None:
        model(torch.randn(4, 300)).square().sum().backward()
        one.step()
        other.step()

    with pytest.raises(OptionError, match=told):
        step()


def test_two_optimizers_over_parts_of_a_model_are_fine() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    both = [AdamW(part.parameters(), overlap="backward", module=model) for part in model]
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(4, 8)).square().sum().backward()
    for optimizer in both:
        optimizer.step()
        optimizer.close()
    assert not any(map(torch.equal, model.parameters(), before))


DISK = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "params", "max_in_cpu": 1}}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"zero_optimization": DISK}, r"offload_param\.max_in_cpu=1 was given, and"),
        ({"optimizer": {"type": "Adam", "params": {"betas": 0.9}}}, "betas=0.9 was given"),
        ({"optimizer": {"type": "Adam", "params": {"lr": -1.0}}}, "lr=-1.0 was given"),
    ],
)
def test_deepspeeds_users_are_told_their_own_keys(
    given: dict[str, Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, **given}
    with pytest.raises((OptionError, BudgetError), match=told):
        deepspeed.initialize(model=model, config=config)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: DiskOffloader("x", n_entries=0), "n_entries=0 was given"),
        (lambda: DiskOffloader("x", n_entries="many"), "n_entries='many' was given"),
        (lambda: DiskOffloader(""), 'dir_name="" was given'),
        (lambda: AsyncFileWriter("x", n_entries=0), "n_entries=0 was given"),
    ],
)
def test_the_depth_is_called_what_users_called_it(
    make: Callable[[], object], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StowError, match=told):
        make()


def test_ranks_that_share_a_directory_are_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    first = AdamW(parameters, states="disk", dir=tmp_path)
    with pytest.raises(LockedError, match="Wait until that is over") as caught:
        AdamW(parameters, states="disk", dir=tmp_path)
    assert "This is rank" not in str(caught.value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 2)
    monkeypatch.setattr(dist, "get_rank", lambda *_: 1)
    with pytest.raises(LockedError, match=r"This is rank 1 of 2: .* waiting does not help"):
        AdamW(parameters, states="disk", dir=tmp_path)
    first.close()
