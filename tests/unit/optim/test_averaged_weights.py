"""`averaged()`: averages in the place of weights, and the weights back, bit for bit."""

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tensorstow
from ranks.pool import Ranks
from ranks.stowed import loss_of, model_of
from ranks.twin import Twins
from remote import make_remote
from tensorstow import AdamW, Plan
from tensorstow.base.errors import CommitError, OptionError
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import UpdateOn
from tensorstow.optim.stowed_adam import StowedAdam
from unit.optim.test_averages import SMALL, make_model
from unit.optim.test_averages import train as take_step

Pool = Callable[[int], Ranks]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PLACES: dict[str, dict[str, Any]] = {
    "host": {},
    "disk": {"states": "disk", "durability": "none"},
    "split": {"states": 0.5, "durability": "none"},
    "durable": {"states": "disk", "commit_every": None},
    "forward": {"states": "disk", "durability": "none", "overlap": "forward"},
    "backward": {"states": 0.5, "durability": "none", "overlap": "backward"},
    "speculative": {"states": "disk", "durability": "none", "overlap": "speculative"},
}
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_place = pytest.mark.parametrize("place", PLACES)


def make(model: nn.Module, place: str, directory: Path) -> AdamW:
    where = PLACES[place]
    if place != "host":
        where = {**where, "dir": directory, "policy": SMALL}
    if "overlap" in where:
        where["module"] = model
    return AdamW(model.parameters(), lr=1e-2, ema=0.7, **where)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        take_step(model, optimizer, step)


def copies(tensors: Iterator[Any]) -> list[torch.Tensor]:
    return [t.detach().clone() for t in tensors]


def everything(model: nn.Module, optimizer: StowedAdam) -> list[torch.Tensor]:
    states = optimizer.state_dict()["state"]
    return copies(iter([*model.parameters(), *(t for e in states.values() for t in e.values())]))


def averages_of(optimizer: StowedAdam, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return copies of the averages, rounded as weights are."""
    entries = optimizer.state_dict()["state"].values()
    return [entry["ema"].clone().to(dtype) for entry in entries]


def assert_same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert [t.dtype for t in ours] == [t.dtype for t in theirs]
    assert all(map(torch.equal, ours, theirs))


@every_dtype
@every_place
def test_weights_are_averages_and_come_back(dtype: torch.dtype, place: str, tmp_path: Path) -> None:
    whole, model = make_model(dtype), make_model(dtype)
    with make(whole, "host", tmp_path) as optimizer:
        train(whole, optimizer, range(6))
        wanted = everything(whole, optimizer)
    with make(model, place, tmp_path) as optimizer:
        train(model, optimizer, range(3))
        before = everything(model, optimizer)
        averages = averages_of(optimizer, dtype)
        for _ in range(2):
            with optimizer.averaged(model):
                assert_same(copies(model.parameters()), averages)
                assert not torch.equal(averages[0], before[0])
            assert_same(everything(model, optimizer), before)
        if place == "durable":
            optimizer.commit()
            with optimizer.averaged(model):
                pass
            assert optimizer.resume() == 3
            assert_same(everything(model, optimizer), before)
        train(model, optimizer, range(3, 6))
        assert_same(everything(model, optimizer), wanted)


@every_place
def test_weights_come_back_after_an_error(place: str, tmp_path: Path) -> None:
    model = make_model()
    with make(model, place, tmp_path) as optimizer:
        train(model, optimizer, range(3))
        before = everything(model, optimizer)
        with pytest.raises(ZeroDivisionError), optimizer.averaged(model):
            1 / 0  # noqa: B018  # an error in the block
        assert_same(everything(model, optimizer), before)


def test_an_interrupt_while_it_begins_leaves_the_weights(tmp_path: Path) -> None:
    model = make_model()
    with make(model, "disk", tmp_path) as optimizer:
        train(model, optimizer, range(3))
        before = everything(model, optimizer)
        hooks = iter(range(4))

        def interrupt(_: bool) -> None:  # noqa: FBT001  # a hook
            if next(hooks) == 1:  # the averages are in place
                signal.raise_signal(signal.SIGINT)

        optimizer._register_rewrite_hook(interrupt)
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & ignores it
        try:
            with pytest.raises(KeyboardInterrupt), optimizer.averaged(model):
                pass
        finally:
            signal.signal(signal.SIGINT, handler)
        assert next(hooks, None) is None
        assert_same(everything(model, optimizer), before)
        train(model, optimizer, range(1))


def test_calls_that_would_take_averages_for_weights_are_refused(tmp_path: Path) -> None:
    model = make_model()
    with make(model, "durable", tmp_path) as optimizer:
        train(model, optimizer, range(2))
        before = everything(model, optimizer)
        saved = optimizer.state_dict()
        with optimizer.averaged(model):
            calls: list[Any] = [
                optimizer.step,
                optimizer.state_dict,
                optimizer.resume,
                optimizer.close,
                optimizer.synchronize,
                partial(optimizer.load_state_dict, saved),
                partial(optimizer.save_safetensors, tmp_path / "states.safetensors"),
                partial(optimizer.commit_to, tmp_path / "other"),
                partial(optimizer.add_param_group, {"params": [nn.Parameter(torch.ones(3))]}),
                partial(optimizer.clip_grad_norm_, 1.0),
            ]
            for call in calls:
                with pytest.raises(OptionError, match=r"inside `with optimizer\.averaged"):
                    call()
            for commit in (optimizer.commit, partial(optimizer.snapshot, "a")):
                with pytest.raises(CommitError, match=r"inside `with optimizer\.averaged"):
                    commit()
            with pytest.raises(OptionError, match="inside averaged"):
                optimizer.averaged(model).__enter__()
        assert_same(everything(model, optimizer), before)
        assert optimizer.commit() == 2


def test_another_model_is_refused(tmp_path: Path) -> None:
    model = make_model()
    with make(model, "host", tmp_path) as optimizer:
        train(model, optimizer, range(2))
        for other in (make_model(), model[0]):
            with (
                pytest.raises(OptionError, match=r"lacks \d of the 5 parameters"),
                optimizer.averaged(other),
            ):
                pass
    plain = AdamW(model.parameters())
    with plain, pytest.raises(OptionError, match="keeps no averages"), plain.averaged(model):
        pass


def test_frozen_weights_and_those_without_a_step_stay(tmp_path: Path) -> None:
    model = make_model()
    model[1].weight.requires_grad_(requires_grad=False)
    with make(model, "disk", tmp_path) as optimizer:
        before = copies(model.parameters())
        with optimizer.averaged(model):
            assert_same(copies(model.parameters()), before)
        train(model, optimizer, range(2))
        with optimizer.averaged(model):
            assert torch.equal(model[1].weight, before[2])
            assert not torch.equal(model[0].weight, before[0])


@every_place
def test_a_16_bit_weight_that_the_user_wrote_comes_back(place: str, tmp_path: Path) -> None:
    ours, theirs = make_model(torch.bfloat16), make_model(torch.bfloat16)
    ended = []
    for model, name in ((ours, place), (theirs, "host")):
        with make(model, name, tmp_path) as optimizer:
            train(model, optimizer, range(2))
            with torch.no_grad():
                model[1].weight.mul_(1.5)
            if model is ours:
                written = copies(model.parameters())
                with optimizer.averaged(model):
                    pass
                assert_same(copies(model.parameters()), written)
            train(model, optimizer, range(2, 4))
            ended.append(everything(model, optimizer))
    assert_same(*ended)


@every_dtype
@pytest.mark.parametrize("update_on", ["host", "device"])
def test_weights_on_an_accelerator(
    dtype: torch.dtype, update_on: UpdateOn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, model = make_model(dtype), make_model(dtype)
    with make(whole, "host", tmp_path) as optimizer:
        train(whole, optimizer, range(5))
        wanted = everything(whole, optimizer)
    make_remote(monkeypatch)
    options: dict[str, Any] = {"states": "disk", "dir": tmp_path, "durability": "none"}
    with AdamW(
        model.parameters(), lr=1e-2, ema=0.7, update_on=update_on, policy=SMALL, **options
    ) as optimizer:
        train(model, optimizer, range(3))
        before = everything(model, optimizer)
        averages = averages_of(optimizer, dtype)
        with optimizer.averaged(model):
            assert_same(copies(model.parameters()), averages)
        assert_same(everything(model, optimizer), before)
        train(model, optimizer, range(3, 5))
        assert_same(everything(model, optimizer), wanted)


@pytest.mark.parametrize("parameters", [Tier.HOST, Tier.DISK])
def test_a_stowed_model_exports_averages(parameters: Tier, tmp_path: Path) -> None:
    plan = tensorstow.Plan(parameters=parameters, states="disk")
    factory = partial(AdamW, lr=1e-2, ema=0.7)
    model, optimizer = tensorstow.stow(make_model(torch.bfloat16), factory, plan=plan)
    train(model, optimizer, range(3))
    names = [name for name, _ in model.named_parameters()]
    states = [optimizer.states_of(p) for p in model.parameters()]
    with torch.no_grad(), optimizer.averaged(model):
        inside = model(torch.ones(2, 37, dtype=torch.bfloat16)).clone()
        tensorstow.save_safetensors(model, tmp_path / "averages")
    outside = model(torch.ones(2, 37, dtype=torch.bfloat16)).clone()
    tensorstow.save_safetensors(model, tmp_path / "weights")
    optimizer.close()
    averages = load_file(tmp_path / "averages" / "model.safetensors")
    weights = load_file(tmp_path / "weights" / "model.safetensors")
    for name, state in zip(names, states, strict=True):
        assert state is not None
        assert torch.equal(averages[name], state["ema"].bfloat16())
        assert torch.equal(weights[name], state["master"].bfloat16())
    for values, seen in ((averages, inside), (weights, outside)):
        alone = make_model(torch.bfloat16)
        alone.load_state_dict(values)
        assert torch.equal(alone(torch.ones(2, 37, dtype=torch.bfloat16)), seen)


def compare_inside(stage: int, parameters: Tier, dtype: torch.dtype) -> None:
    plan = Plan(parameters=parameters, states="disk", stage=stage)
    factory = partial(AdamW, lr=1e-2, ema=0.7)
    both = Twins(lambda: model_of(dtype), lambda m, r, b: loss_of(m, r, b, 0), plan, factory)
    both.train(range(3))
    for _ in range(2):
        with both.ours.averaged(both.stowed), both.theirs.averaged(both.alone):
            both.compare()
            losses = [loss_of(m, 0, 9, 0) for m in (both.stowed, both.alone)]
            assert torch.equal(*losses)
        both.compare()
    both.train(range(3, 5))
    both.compare()
    both.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("stage", "parameters"), [(1, Tier.HOST), (2, Tier.HOST), (3, Tier.HOST), (3, Tier.DISK)]
)
def test_several_ranks_see_the_averages_of_one(
    ranks: Pool, stage: int, parameters: Tier, dtype: torch.dtype
) -> None:
    ranks(2).run(compare_inside, stage, parameters, dtype)
