"""Hooks on modules: tensors are found in any object that is returned, submodules may be called."""

import copy
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import tensorstow
from ranks.pool import Pool
from ranks.stowed import twins
from ranks.twin import FETCHED, Twins
from tensorstow import Plan
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.module_hooks import param_groups_of
from torch_versions import RESETS_FSDP

SIZE = 6
PLANS = [
    Plan(parameters="host"),
    Plan(parameters="disk", states="disk"),
    Plan(parameters="disk", states="disk", overlap="backward"),
    Plan(stage=2),
]


class Held:
    """Holds a tensor where FSDP2 does not look."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.seen = seen


class Slotted:
    """Holds one in a slot, within another object."""

    __slots__ = ("held", "missing")

    def __init__(self, seen: torch.Tensor) -> None:
        self.held = {"set": [Held(seen)]}


def slotted(seen: torch.Tensor) -> Slotted:
    return Slotted(seen)


def found(value: object) -> torch.Tensor:
    """Return the tensor in ``value``, whatever it is."""
    if isinstance(value, Slotted):
        value = value.held["set"][0]
    if isinstance(value, Held):
        return value.seen
    if callable(value) and not isinstance(value, torch.Tensor):
        value = value()
    assert isinstance(value, torch.Tensor)
    return value


class Block(nn.Module):
    """Returns what ``wrap`` makes of a tensor."""

    def __init__(self, wrap: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)
        self.wrap = wrap

    def forward(self, x: object) -> object:
        return self.wrap(torch.tanh(self.inner(found(x))))


class Wrapped(nn.Module):
    """Blocks and a model that return objects."""

    def __init__(self, wrap: Callable[[torch.Tensor], object] = Held) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(wrap) for _ in range(3))
        self.head = nn.Linear(SIZE, 2)
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> object:
        for block in self.blocks:
            x = block(x)
        return self.wrap(self.head(found(x)))


def stowed(model: nn.Module, plan: Plan) -> tuple[nn.Module, tensorstow.AdamW]:
    """Stow with shards, over one rank too."""
    return tensorstow.stow(
        model, partial(tensorstow.AdamW, lr=1e-2), plan=plan, compute_dtype=torch.float32
    )


def loss(model: nn.Module, rank: int, batch: int) -> torch.Tensor:
    seen = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(100 * rank + batch))
    return found(model(seen)).square().mean()


def trained(plan: Plan) -> None:
    """Train models that return objects beside the same in one process."""
    for wrap in (Held, slotted):
        both = Twins(partial(Wrapped, wrap), loss, plan)
        both.train(range(3))
        both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", [Plan(), FETCHED, Plan(stage=2)], ids=["host", "disk", "stage 2"])
def test_a_model_that_returns_objects_trains_alike(ranks: Pool, plan: Plan, world: int) -> None:
    ranks(world).run(trained, plan)


class Listed(list[object]):
    """A list with a tensor in an attribute: FSDP2 looks at the items."""

    seen: torch.Tensor


def listed(seen: torch.Tensor) -> Listed:
    made = Listed()
    made.seen = seen
    return made


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "deque": lambda seen: deque([seen]),
    "subclass of list": listed,
    "mapping": lambda seen: MappingProxyType({"seen": seen}),
    "values": lambda seen: {"seen": seen}.values(),
}


def held_in(value: object) -> torch.Tensor:
    if isinstance(value, Listed):
        return value.seen
    items: Any = value.values() if isinstance(value, Mapping) else value
    (only,) = items
    return found(only)


class HeldIn(nn.Module):
    """Blocks that return a tensor in a ``holder``."""

    def __init__(self, holder: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(HOLDERS[holder]) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = held_in(block(x))
        return x


@pytest.mark.parametrize("holder", HOLDERS)
def test_tensors_are_found_in_holders_of_any_kind(holder: str) -> None:
    alone, (model, optimizer) = HeldIn(holder), stowed(HeldIn(holder), PLANS[1])
    for each in (alone, model):
        loss(each, 0, 0).backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        gradient: Any = got.grad
        assert want.grad is not None
        assert torch.equal(gradient.full_tensor(), want.grad)
    optimizer.close()


def twice(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def once(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: found(model(x)).tanh().sum())(x).square().sum()

    return torch.func.grad(once)(x)


@RESETS_FSDP
def test_what_torch_func_derives_twice_is_right_or_an_error() -> None:
    alone, (model, optimizer) = Wrapped(), stowed(Wrapped(), PLANS[1])
    x = torch.ones(2, SIZE)
    assert torch.equal(twice(model, x), twice(alone, x))
    slope = torch.func.grad(lambda x: found(model(x)).tanh().sum())(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        slope.square().sum().backward()
    optimizer.close()


def penalty(model: nn.Module) -> torch.Tensor:
    """Return what a gradient penalty is: a function of a gradient."""
    x = torch.ones(2, SIZE, requires_grad=True)
    (slope,) = torch.autograd.grad(found(model(x)).sum(), x, create_graph=True)
    return slope.square().sum()


@pytest.mark.parametrize("plan", PLANS, ids=["host", "disk", "beside", "stage 2"])
@pytest.mark.parametrize("wrap", [lambda x: x, Held], ids=["tensors", "objects"])
def test_a_double_backward_is_refused(plan: Plan, wrap: Callable[[torch.Tensor], object]) -> None:
    model, optimizer = stowed(Wrapped(wrap), plan)
    for _ in range(2):  # and training goes on behind it
        with pytest.raises(OptionError, match="create_graph=True"):
            penalty(model)
        found(model(torch.ones(2, SIZE))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()


def test_a_double_backward_of_a_whole_model_is_right() -> None:
    model, alone = Wrapped(), Wrapped()
    model, optimizer = tensorstow.stow(model, partial(tensorstow.AdamW, lr=1e-2), plan=Plan())
    penalty(model).backward()
    penalty(alone).backward()
    for got, want in zip(model.parameters(), alone.parameters(), strict=True):
        assert (got.grad is None) == (want.grad is None)
        assert got.grad is None or torch.equal(got.grad, want.grad)
    optimizer.close()


def closed(seen: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that has a tensor: nobody can find it."""
    return lambda: seen


@pytest.mark.parametrize("plan", PLANS[:2], ids=["host", "disk"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_graph_is_not_gone_through_without_its_weights(plan: Plan, frozen: bool) -> None:  # noqa: FBT001
    model = Wrapped(closed)
    model.blocks[1].requires_grad_(requires_grad=not frozen)
    model, optimizer = stowed(model, plan)
    out = found(model(torch.ones(2, SIZE, requires_grad=True)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    optimizer.close()


class Shift(nn.Module):
    """Its gradients need no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(SIZE))

    def forward(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        return closed(x + self.shift)


def test_gradients_that_nobody_reduced_are_no_step() -> None:
    model, optimizer = stowed(Shift(), Plan())
    found(model(torch.ones(2, SIZE))).sum().backward()
    with pytest.raises(OptionError, match="not reduced"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.step()  # of nothing
    optimizer.close()


def called_alone(plan: Plan) -> None:
    """Call the head by itself, first of all and behind training."""
    both = twins(plan)
    width = both.alone.head.in_features
    for batches in (range(2), range(2, 3)):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                mine = both.stowed.head(torch.ones(2, width))
                assert torch.equal(mine, both.alone.head(torch.ones(2, width)))
        with pytest.raises(OptionError, match="head was called by itself"):
            both.stowed.head(torch.ones(2, width))
        with torch.no_grad(), pytest.raises(RuntimeError):
            both.stowed.head(torch.ones(2, width + 1))  # what fails leaves nothing gathered
        both.train(batches)
    both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    "plan", [Plan(), FETCHED, Plan(stage=2, overlap="backward")], ids=["host", "disk", "stage 2"]
)
def test_a_part_is_called_by_itself(ranks: Pool, plan: Plan, world: int) -> None:
    ranks(world).run(called_alone, plan)


class Words(nn.Module):
    """Has embeddings, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.image = nn.Conv2d(2, 2, 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.words(words)
        for block in self.blocks:
            given = block(given)
        return given

    def get_input_embeddings(self) -> nn.Embedding:
        return self.words

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.words = value

    def resize_token_embeddings(self, new_num_tokens: int | None = None) -> nn.Embedding:
        assert new_num_tokens in {None, 5}
        return self.words


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (copy.deepcopy, "full_tensor"),
        (AveragedModel, "full_tensor"),
        (lambda model: copy.deepcopy(model.blocks), "full_tensor"),
        (lambda model: model.resize_token_embeddings(6), r"Resize before\s+stow"),
        (lambda model: model.set_input_embeddings(nn.Embedding(5, 4)), r"Set it\s+before stow"),
        (lambda model: model.half(), "Cast before stow"),
        (lambda model: model.to(torch.bfloat16), "Cast before stow"),
        (lambda model: model.to("meta"), "Cast before stow"),
        (lambda model: model.blocks[0].double(), "Cast before stow"),
        (lambda model: model.share_memory(), "shared"),
        (lambda model: model.words.half(), "Cast before stow"),
        (lambda model: model.image.to("meta"), "Cast before stow"),
        (lambda model: copy.deepcopy(model.words), "full_tensor"),
        (lambda model: model.to(memory_format=torch.channels_last), "memory format"),
    ],
    ids=range(14),
)
def test_what_would_part_model_and_optimizer_is_refused(
    change: Callable[[nn.Module], object], words: str
) -> None:
    plan = Plan(parameters="disk", states="disk")
    model, optimizer = tensorstow.stow(Words(), partial(tensorstow.AdamW, lr=1e-2), plan=plan)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(OptionError, match=words):
        change(model)
    for same in (model.float(), model.to("cpu"), model.to(torch.float32), model.cpu()):
        assert same is model
    assert model.resize_token_embeddings(5) is model.resize_token_embeddings() is model.words
    model.set_input_embeddings(model.words)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    optimizer.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_unit_may_be_called_before_the_model(
    mode: Callable[[], AbstractContextManager[None]],
) -> None:
    plan = Plan(parameters="disk", states="disk")
    made = Words()
    given = partial(tensorstow.AdamW, lr=1e-2)
    model, optimizer = tensorstow.stow(made, given, plan=plan, units=list(made.blocks))
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    with mode():
        alone = model.blocks[0](torch.ones(2, 4))
    wanted = nn.functional.linear(torch.ones(2, 4), kept["blocks.0.weight"], kept["blocks.0.bias"])
    assert torch.equal(alone, wanted)
    model(torch.arange(5)).sum().backward()
    optimizer.step()
    after = model.state_dict()
    trained = {name for name, value in kept.items() if not torch.equal(value, after[name])}
    assert trained == {name for name in kept if not name.startswith("image")}
    optimizer.close()


def test_groups_are_read_as_each_torch_keeps_them() -> None:
    first, second = object(), object()
    assert param_groups_of(SimpleNamespace(_fsdp_param_groups=[first, second])) == [first, second]
    assert param_groups_of(SimpleNamespace(_fsdp_param_group=first)) == [first]  # torch 2.11
    assert param_groups_of(SimpleNamespace(_fsdp_param_group=None)) == []
