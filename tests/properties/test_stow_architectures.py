"""Parity of architectures: tensors and weights with uses in several units get the same bits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch
from torch import nn

import tensorstow
from compare import all_equal
from parity.architectures import ARCHITECTURES, OF_TRANSFORMERS
from parity.cover import crossed
from ranks.pool import Ranks
from ranks.twin import FETCHED, Twins, whole
from tensorstow import Plan
from tensorstow.fsdp import placements

ALL = {**ARCHITECTURES, **OF_TRANSFORMERS}
STEPS = 3
ADAMW = partial(tensorstow.AdamW, lr=1e-2)
PLANS = {
    "device": Plan(parameters="device"),
    "host": Plan(states="disk"),
    "sharded": Plan(states="disk"),
    "sharded-forward": Plan(states="disk", overlap="forward"),
    "sharded-backward": Plan(states="disk", overlap="backward"),
    "disk": Plan(parameters="disk", states="disk"),
    "disk-backward": Plan(parameters="disk", states="disk", overlap="backward"),
    "disk-recompute": Plan(parameters="disk", activations="recompute"),
}
"""Those that are sharded have a compute_dtype: FSDP2 takes weights in host memory too."""

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ALL[name]()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the losses, and then all weights."""
    found: list[torch.Tensor] = []
    for batch in range(STEPS):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found + [w for p in model.parameters() if (w := whole(p)) is not None]


@cache
def alone(name: str, threads: int) -> list[torch.Tensor]:
    """Return the result of plain autograd, with everything in memory."""
    with torch_threads(threads):
        model = model_of(name)
        return train(model, ADAMW(list(model.named_parameters())))


def stowed(name: str, plan: str, threads: int = 1) -> list[torch.Tensor]:
    with torch_threads(threads):
        model, optimizer = placed(name, plan)
        found = train(model, optimizer)
        optimizer.close()
    return found


def placed(name: str, plan: str) -> tuple[nn.Module, tensorstow.AdamW]:
    dtype = torch.float32 if plan.startswith("sharded") else None
    return tensorstow.stow(model_of(name), ADAMW, plan=PLANS[plan], compute_dtype=dtype)


@crossed(name=tuple(ARCHITECTURES), plan=tuple(PLANS), threads=(1, 2))
def test_every_placement_has_the_bits_of_plain_autograd(name: str, plan: str, threads: int) -> None:
    assert all_equal(stowed(name, plan, threads), alone(name, threads))


@crossed(name=tuple(OF_TRANSFORMERS), plan=("disk", "disk-backward"), threads=(1, 2))
def test_models_of_transformers_have_the_bits_too(name: str, plan: str, threads: int) -> None:
    assert all_equal(stowed(name, plan, threads), alone(name, threads))


def trained(name: str, plan: Plan) -> None:
    """Train in every rank, beside a model that sees all ranks' batches."""
    both = Twins(lambda: model_of(name), lambda model, rank, batch: model(10 * rank + batch), plan)
    both.train()
    both.close()


@pytest.mark.parametrize("plan", [Plan(), FETCHED, Plan(stage=2)], ids=["host", "disk", "stage 2"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_two_ranks_have_the_bits_of_one_that_adds_in_their_order(
    ranks: Callable[[int], Ranks], name: str, plan: Plan
) -> None:
    ranks(2).run(trained, name, plan)


@pytest.mark.parametrize("plan", ["sharded", "disk"])
def test_weights_in_use_begin_where_torchs_own_do(plan: str) -> None:
    """Libraries choose kernels by addresses: one of 4 bytes more may give a product other bits."""
    model, optimizer = placed("no input gradients", plan)
    seen = []

    def note(module: nn.Module, _: object) -> None:
        seen.extend(p.data_ptr() % 64 for p in module.parameters(recurse=False))

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(note)
    model(0)
    assert len(seen) == 18
    assert not any(seen)
    optimizer.close()


@pytest.mark.parametrize("name", ["encoder-decoder", "repeated", "u-net", "branches"])
def test_a_node_at_the_inputs_of_units_would_change_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else these architectures would prove nothing: FSDP2's own hooks add such nodes."""
    monkeypatch.setattr(placements, "watch_backwards", lambda _: None)
    assert not all_equal(stowed(name, "disk"), alone(name, 1))
