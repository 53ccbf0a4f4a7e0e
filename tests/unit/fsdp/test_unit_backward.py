"""When a unit's backward begins and ends, which no node of autograd's graph tells."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

import tensorstow
from compare import all_equal
from parity.architectures import ARCHITECTURES, Branches, Checkpointed, EncoderDecoder, Repeated
from ranks.twin import whole
from tensorstow import Plan

ON_DISK = Plan(parameters="disk", states="disk")
ROOT = ""


class Gathered:
    """Which units have their weights, and how often each got them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now: set[str] = set()
        self.most = 0
        """Units beside the root that had theirs at once."""
        self.times: dict[str, int] = {}
        enter, leave = FSDPParamGroup._to_unsharded, FSDPParamGroup._to_sharded

        def gathered(group: Any) -> None:  # noqa: ANN401  # torch's own, not public
            if not group.is_unsharded:
                self.times[group._module_fqn] = self.times.get(group._module_fqn, 0) + 1
                self.now.add(group._module_fqn)
                self.most = max(self.most, len(self.now - {ROOT}))
            enter(group)

        def released(group: Any) -> None:  # noqa: ANN401
            self.now.discard(group._module_fqn)
            leave(group)

        patch.setattr(FSDPParamGroup, "_to_unsharded", gathered)
        patch.setattr(FSDPParamGroup, "_to_sharded", released)


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> Gathered:
    return Gathered(monkeypatch)


def stowed(make: Callable[[], nn.Module], plan: Plan = ON_DISK) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return tensorstow.stow(make(), partial(tensorstow.AdamW, lr=1e-2), plan=plan)


def gradients(model: nn.Module) -> Iterator[torch.Tensor]:
    return (g for p in model.parameters() if (g := whole(p.grad)) is not None)


def plain(make: Callable[[], nn.Module], losses: Callable[[nn.Module], None]) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    losses(model)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_unit_at_a_time_has_its_weights(name: str, gathered: Gathered) -> None:
    """Also if its inputs need no gradients, or are those of other units."""
    model, optimizer = stowed(ARCHITECTURES[name])
    model(0).backward()
    assert gathered.most == 1
    assert not gathered.now
    optimizer.close()


@pytest.mark.parametrize(("make", "calls"), [(EncoderDecoder, 1), (Branches, 1), (Repeated, 2)])
def test_each_call_gathers_weights_once_for_its_backward(
    make: Callable[[], nn.Module], calls: int, gathered: Gathered
) -> None:
    model, optimizer = stowed(make)
    model(0).backward()
    assert gathered.times.pop(ROOT) == 2
    assert set(gathered.times.values()) == {2 * calls}
    optimizer.close()


def test_a_backward_inside_of_a_backward_ends_its_units(gathered: Gathered) -> None:
    model, optimizer = stowed(Checkpointed)
    model(0).backward()
    assert gathered.most == 1
    alone = plain(Checkpointed, lambda model: model(0).backward())
    assert all_equal(gradients(model), gradients(alone))
    optimizer.close()


def backward_again(model: nn.Module) -> None:
    loss = model(0)
    loss.backward(retain_graph=True)
    loss.backward()


def two_forwards(model: nn.Module) -> None:
    first, second = model(0), model(1)
    first.backward()
    second.backward()


def other_thread(model: nn.Module) -> None:
    """Threads count nodes by themselves, so that numbers of two are not compared."""
    for _ in range(50):
        torch.ones(1, requires_grad=True).mul(2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, 0).result().backward()
    model(1).backward()


@pytest.mark.parametrize("losses", [backward_again, two_forwards, other_thread])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_of_several_passes(name: str, losses: Callable[[nn.Module], None]) -> None:
    model, optimizer = stowed(ARCHITECTURES[name], Plan(parameters="disk"))
    losses(model)
    assert all_equal(gradients(model), gradients(plain(ARCHITECTURES[name], losses)))
    optimizer.close()


class PassesOn(nn.Module):
    """A block that returns what it is given beside what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inner(x + given), given


class Passing(nn.Module):
    """The first block's input comes through all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(PassesOn() for _ in range(4))

    def forward(self, batch: int) -> torch.Tensor:
        x = given = self.first(torch.full((2, 4), float(batch)))
        for block in self.blocks:
            x, given = block(x, given)
        return (x * given).sum()


def test_an_input_that_is_returned_begins_no_backward(gathered: Gathered) -> None:
    """Its gradient is complete when the units that have passed it on are long released."""
    model, optimizer = stowed(Passing)
    model(1).backward()
    assert gathered.most == 1
    assert set(gathered.times.values()) == {2}
    alone = plain(Passing, lambda model: model(1).backward())
    assert all_equal(gradients(model), gradients(alone))
    optimizer.close()
