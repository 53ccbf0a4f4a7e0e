"""16-bit parameters with fp32 masters: the bits of the class over fp32 copies, rounded."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from tensorstow import PipelinePolicy, StowedOptimizer
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.optim.generic.masters import MASTER, put_master, stand_ins, take_master
from tensorstow.optim.options import StatePlacement

CLASSES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "AdamW": (optim.AdamW, {"lr": 0.01}),
    "Adafactor": (optim.Adafactor, {"lr": 0.1}),
    "Muon": (optim.Muon, {"lr": 0.02}),
}
SHAPES = ((129, 517), (8, 8), (97, 161))


class Copies:
    """16-bit parameters that are stowed, and fp32 copies that the class steps."""

    def __init__(self, name: str, dtype: torch.dtype, **placement: Any) -> None:  # noqa: ANN401
        """Make both."""
        torch.manual_seed(0)
        self.kind, self.options = CLASSES[name]
        self.placement = {"policy": PipelinePolicy(chunk_elements=4096), **placement}
        values = [torch.randn(shape).to(dtype) for shape in SHAPES]
        self.small = [nn.Parameter(value) for value in values]
        self.small.append(nn.Parameter(torch.ones(5, 5)))  # fp32 ones have no master
        self.wide = [nn.Parameter(p.detach().float().clone()) for p in self.small]
        self.ours = self.make()
        plain = {} if self.kind is optim.Muon else {"foreach": False}
        self.theirs = self.kind(self.wide, **self.options, **plain)

    def make(self) -> StowedOptimizer:
        """Return the class stowed, with masters."""
        return StowedOptimizer(
            self.kind, self.small, state_format="fp32", **self.options, **self.placement
        )

    def step(self, seed: int, *, wide: bool = False) -> None:
        """Step both by the same gradients; ``wide`` ones are sums in fp32."""
        generator = torch.Generator().manual_seed(seed)
        for small, copy in zip(self.small, self.wide, strict=True):
            gradient = torch.randn(small.shape, generator=generator)
            small.grad_dtype = None
            small.grad = gradient if wide else gradient.to(small.dtype)
            copy.grad = small.grad.float()
        self.ours.step()
        self.theirs.step()

    def compare(self) -> None:
        """Raise AssertionError unless weights, masters and states are the same to the bit."""
        for small, copy in zip(self.small, self.wide, strict=True):
            assert torch.equal(small, copy.to(small.dtype))
            states = self.ours.states_of(small)
            assert states is not None
            if small.dtype != torch.float32:
                assert torch.equal(states.pop(MASTER), copy)
            for name, value in self.theirs.state[copy].items():
                assert torch.equal(torch.as_tensor(states[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("states", ["host", "disk", 0.5])
@pytest.mark.parametrize("name", CLASSES)
def test_weights_are_roundings_of_what_the_class_steps(
    tmp_path: Path, name: str, states: StatePlacement, dtype: torch.dtype
) -> None:
    directory = {} if states == "host" else {"dir": tmp_path}
    both = Copies(name, dtype, states=states, **directory)
    elementwise = name in {"SGD", "AdamW"}
    if states == "disk":
        assert both.ours.plan()[0].how == ("chunks" if elementwise else "whole")
    for seed in range(4):
        both.step(seed, wide=seed == 2)
        both.compare()
        if seed == 1:
            assert both.ours.predict().logical_bytes == both.ours._memory().logical_bytes
            saved = both.ours.state_dict()
            both.ours.close()
            both.ours = both.make()
            both.ours.load_state_dict(saved)
    both.ours.close()


@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize(
    "write",
    [lambda p: p.detach()[3].zero_(), lambda p: p.data[3].zero_()],
    ids=["in place", "data"],
)
def test_a_master_begins_again_where_someone_else_wrote(
    states: StatePlacement, write: Callable[[torch.Tensor], object]
) -> None:
    both = Copies("AdamW", torch.bfloat16, states=states)
    both.step(0)
    for parameter in (both.small[0], both.wide[0]):
        write(parameter)
    both.step(1)
    both.compare()
    with torch.no_grad():
        both.small[0].copy_(both.small[0].clone())  # the same bits: every master stays
    both.step(2)
    both.compare()
    both.ours.close()


def test_states_without_masters_are_loaded_and_their_weights_begin_them() -> None:
    both = Copies("Muon", torch.bfloat16, states="host")
    both.step(0)
    saved = both.ours.state_dict()
    for entry in saved["state"].values():
        entry.pop(MASTER, None)
    both.ours.load_state_dict(saved)
    with torch.no_grad():
        for small, copy in zip(both.small, both.wide, strict=True):
            copy.copy_(small)
    both.step(1)
    both.compare()
    both.ours.close()


def test_without_masters_16_bit_gradients_alone_are_taken() -> None:
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    plain = StowedOptimizer(optim.Muon, [weight], states="host")
    weight.grad_dtype = None
    weight.grad = torch.ones(4, 4)
    with pytest.raises(DTypeError, match='Use state_format="fp32", which keeps fp32 masters'):
        plain.step()
    plain.close()
    masters = StowedOptimizer(optim.Muon, [weight], states="host", state_format="fp32")
    weight.grad = torch.ones(4, 4, dtype=torch.float64)
    with pytest.raises(DTypeError, match=r"is torch\.float64"):
        masters.step()
    masters.close()


@pytest.mark.parametrize("given", ["split", "bf16", "int8", "fp16", ""])
def test_other_formats_are_refused(given: str) -> None:
    weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(OptionError, match=rf"^state_format='{given}' was given: a stowed class"):
        StowedOptimizer(optim.Muon, [weight], state_format=given)


class NamesItMaster(optim.SGD):
    """Keeps a state of the masters' name."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Keep it."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter][MASTER] = torch.ones(1)


def test_a_state_of_the_same_name_is_named() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    mine = StowedOptimizer(NamesItMaster, [weight], state_format="fp32", per_parameter=True)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(OptionError, match="The class keeps a state 'master' of its own"):
        mine.step()
    mine.close()


class Begins(optim.Optimizer):
    """Creates a state in its constructor, of the parameter's dtype."""

    def __init__(self, params: Any, lr: float = 0.25) -> None:  # noqa: ANN401
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["sum"] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        """Add to it."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["sum"].add_(parameter.grad)
                    parameter.sub_(self.state[parameter]["sum"], alpha=group["lr"])


def test_a_class_that_begins_with_states_has_them_in_fp32() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    mine = StowedOptimizer(Begins, [weight], state_format="fp32", per_parameter=True)
    weight.grad = torch.full_like(weight, 1.0 / 512)
    for _ in range(2):
        mine.step()
    states = mine.states_of(weight)
    assert states is not None
    assert torch.equal(states["sum"], torch.full((4,), 2.0 / 512))
    assert torch.equal(states[MASTER], torch.full((4,), 1.0 - 3.0 / 2048))
    mine.close()


def test_parts_of_a_master() -> None:
    weight = nn.Parameter(torch.tensor([1.0, 2.0, float("nan")], dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    kept = torch.tensor([1.001, 3.0, 5.0])
    master, states = take_master(weight, {"n": 1, MASTER: kept})
    assert states == {"n": 1}
    assert master.grad is not None
    assert master.grad.dtype == torch.float32
    assert torch.equal(master.nan_to_num(7.0), torch.tensor([1.001, 2.0, 7.0]))
    with torch.no_grad():
        master.add_(1.0)
    assert put_master(weight, master, {"n": 2})["n"] == 2
    assert torch.equal(weight[:2], torch.tensor([2.0, 3.0], dtype=torch.bfloat16))
    (group,) = stand_ins([{"params": [weight, torch.ones(2)], "lr": 1.0}])
    assert [p.is_meta for p in group["params"]] == [True, False]
    assert group["params"][0].dtype == torch.float32
