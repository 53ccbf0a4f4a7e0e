"""Classes of torch step parameters on an accelerator there; states are in host memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from compare import all_equal
from parity.cover import crossed
from ranks.owned import OwnedCase, Tower, loss_of, through_stow
from ranks.pool import Ranks
from tensorstow import PipelinePolicy, Plan, StowedOptimizer, stow
from tensorstow.base.errors import OptionError
from tensorstow.optim.options import StatePlacement

CLASSES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "ASGD": (optim.ASGD, {"lr": 0.01}),
    "Adafactor": (optim.Adafactor, {"lr": 0.1}),
    "Muon": (optim.Muon, {"lr": 0.02}),
}
SHAPES = ((129, 517), (8, 8), (97, 161))


@crossed(dtype=(torch.float32, torch.bfloat16), states=("host", "disk", 0.5), name=tuple(CLASSES))
def test_a_class_has_the_bits_that_it_has_there(
    tmp_path: Path, device: torch.device, name: str, states: StatePlacement, dtype: torch.dtype
) -> None:
    """16-bit weights have fp32 masters, and are compared with fp32 copies, rounded."""
    kind, options = CLASSES[name]
    torch.manual_seed(0)
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    mine = [nn.Parameter(value.to(device)) for value in values]
    copies = [nn.Parameter(value.float().to(device)) for value in values]
    place = {"states": states, "policy": PipelinePolicy(chunk_elements=4096)}
    place |= {} if states == "host" else {"dir": tmp_path}
    make = partial(StowedOptimizer, kind, mine, state_format="fp32", **options, **place)
    ours = make()
    theirs = kind(copies, **options, **({} if kind is optim.Muon else {"foreach": False}))
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for one, other in zip(mine, copies, strict=True):
            one.grad = torch.randn(one.shape, generator=generator).to(dtype).to(device)
            other.grad = one.grad.float()
        ours.step()
        theirs.step()
        if step == 1:
            saved = ours.state_dict()
            ours.close()
            ours = make()
            ours.load_state_dict(saved)
    assert all_equal([p.to(dtype).cpu() for p in copies], [p.detach().cpu() for p in mine])
    for one, other in zip(mine, copies, strict=True):
        entry = ours.states_of(one)
        assert entry is not None
        assert all(t.is_cpu for t in entry.values() if isinstance(t, torch.Tensor) and t.dim())
        for key, value in theirs.state[other].items():
            assert torch.equal(torch.as_tensor(entry[key]).cpu(), torch.as_tensor(value).cpu())
    ours.close()


@pytest.mark.usefixtures("garbage_apart")
def test_the_device_holds_the_states_of_one_parameter_at_a_time(device: torch.device) -> None:
    weights = [nn.Parameter(torch.ones(256, 1024, device=device)) for _ in range(8)]
    one = weights[0].nbytes
    ours = StowedOptimizer(optim.AdamW, weights, states="host")
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        torch.accelerator.synchronize()
        torch.accelerator.memory.reset_peak_memory_stats()
        before = torch.accelerator.memory.memory_allocated()
        ours.step()
        more = torch.accelerator.memory.max_memory_allocated() - before
        assert more <= 5 * one  # two moments, and what the class computes
        assert torch.accelerator.memory.memory_allocated() == before
    ours.close()


class Aliases(optim.SGD):
    """Keeps the gradient itself as a state."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Keep it."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["last"] = parameter.grad


def test_states_that_copies_would_part_are_refused(device: torch.device) -> None:
    weight = nn.Parameter(torch.ones(4, 4, device=device))
    ours = StowedOptimizer(Aliases, [weight], states="host", per_parameter=True)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(OptionError, match="shares memory with another, or with the parameter"):
        ours.step()
    ours.close()


PLANS = [
    ("Muon", Plan(parameters="device", stage=3), 2),
    ("Muon", Plan(parameters="device", stage=2, states="disk"), 2),
    ("Adafactor", Plan(parameters="device", stage=1, accumulation_steps=2), 2),
    ("Shampoo", Plan(parameters="device", stage=3, accumulation_steps=2), 2),
]


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize(
    ("name", "plan", "world"), PLANS, ids=[f"{n}-z{p.stage}-{p.states}" for n, p, _ in PLANS]
)
def test_a_stowed_model_has_the_bits_of_one_rank(
    device_ranks: Callable[[int], Ranks],
    name: str,
    plan: Plan,
    world: int,
    masters: bool,  # noqa: FBT001
) -> None:
    case = OwnedCase(name, options={"state_format": "fp32"} if masters else {})
    dtype = torch.bfloat16 if masters else torch.float32
    sizes = device_ranks(world).run(through_stow, case, plan, dtype)
    here, whole = [here for here, _ in sizes], sizes[0][1]
    assert sum(here) == whole


@pytest.mark.parametrize("by_function", [False, True])
def test_one_rank_trains_by_muon(device: torch.device, by_function: bool) -> None:  # noqa: FBT001
    """A function hides what it makes: gradients then wait in host memory, and come back."""

    def make(named: Any, **placement: Any) -> StowedOptimizer:  # noqa: ANN401
        return StowedOptimizer(optim.Muon, named, lr=0.02, **placement)

    known = partial(StowedOptimizer, optim.Muon, lr=0.02)
    model, ours = stow(Tower(), make if by_function else known, plan=Plan(parameters="device"))
    alone = Tower().to(device)
    theirs = optim.Muon(alone.parameters(), lr=0.02)
    for step in range(3):
        for each, optimizer in ((model, ours), (alone, theirs)):
            loss_of(each, 0, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all_equal(
        [p.detach().cpu() for p in model.parameters()],
        [p.detach().cpu() for p in alone.parameters()],
    )
    ours.close()


def test_weights_in_host_memory_are_left_to_adam(device: torch.device) -> None:
    with pytest.raises(OptionError, match="with parameters in host memory beside an accelerator"):
        stow(Tower(), partial(StowedOptimizer, optim.Muon, lr=0.02), plan=Plan(parameters="host"))
    assert device.type != "cpu"
