"""``PlacedOptimizer``: what Adam, AdamW and every stowed class of torch's have in common."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tensorstow import Adam, AdamW, StowedOptimizer
from tensorstow.base.errors import OptionError, PoisonedError, StowError
from tensorstow.optim.placed import PlacedOptimizer

Make = Callable[..., PlacedOptimizer]
MAKES = {
    "Adam": Adam,
    "AdamW": AdamW,
    "of torch": partial(StowedOptimizer, torch.optim.AdamW),
}
PLACES = ["host", "disk"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8))


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.ones(2, 64)).square().mean()


@pytest.fixture(params=MAKES)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKES[request.param]


@pytest.mark.parametrize("states", PLACES)
def test_one_interface_steps_clips_and_reports(make: Make, states: str) -> None:
    model = net()
    optimizer = make(model.parameters(), lr=1e-2, states=states)
    assert isinstance(optimizer, PlacedOptimizer)
    assert optimizer.placement_of_states == states
    assert optimizer._stowed_class == ("AdamW" if type(optimizer) is StowedOptimizer else "Adam")
    order = []
    optimizer._register_update_hook(lambda: order.append("updated"))
    optimizer._register_close_hook(lambda: order.append("closed"))
    losses = []

    def closure() -> Any:  # noqa: ANN401
        optimizer.zero_grad()
        losses.append(loss(model))
        losses[-1].backward()
        return losses[-1]

    for _ in range(3):
        assert optimizer.step(closure) is losses[-1]
        loss(model).backward()
        with optimizer.updated():
            norm = optimizer.grad_norm()
        assert optimizer.clip_grad_norm_(0.5) == norm
    optimizer.synchronize()
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert optimizer._memory().logical_bytes >= 2 * sum(p.nbytes for p in model.parameters())
    optimizer.close()
    optimizer.close()
    assert order == ["updated"] * 3 + ["closed"] * 2
    with pytest.raises(PoisonedError, match="closed"):
        optimizer.step()


@pytest.mark.parametrize("states", PLACES)
def test_states_of_a_parameter_are_copies_of_those_in_the_state_dict(
    make: Make, states: str
) -> None:
    model = net()
    frozen = model[0].bias.requires_grad_(requires_grad=False)
    optimizer = make(model.parameters(), lr=1e-2, states=states)
    assert optimizer.states_of(frozen) is None
    assert optimizer.states_of(model[0].weight) == {}
    for _ in range(2):
        loss(model).backward()
        optimizer.step()
    saved = optimizer.state_dict()["state"]
    for index, parameter in enumerate(model.parameters()):
        found = optimizer.states_of(parameter)
        if parameter is frozen:
            assert found is None
            continue
        assert found is not None
        assert found.keys() == saved[index].keys()
        assert all(torch.equal(state, saved[index][name]) for name, state in found.items())
        assert all(state.shape in {parameter.shape, ()} for state in found.values())
        found["exp_avg"].zero_()
        assert optimizer.states_of(parameter)["exp_avg"].any()  # type: ignore[index]
    optimizer.close()


@pytest.mark.parametrize("max_norm", ["x", None, float("nan"), -1.0, [1.0]], ids=repr)
def test_a_norm_that_is_no_number_is_an_error(make: Make, max_norm: Any) -> None:  # noqa: ANN401
    model = net()
    optimizer = make(model.parameters())
    loss(model).backward()
    with pytest.raises(OptionError, match="must not be negative"):
        optimizer.clip_grad_norm_(max_norm)
    assert optimizer.clip_grad_norm_(float("inf")) == optimizer.grad_norm()
    optimizer.close()


@pytest.mark.parametrize("states", PLACES)
def test_none_can_be_pickled_or_copied(make: Make, states: str) -> None:
    optimizer = make(net().parameters(), states=states)
    for use in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StowError, match=r"Save state_dict\(\) instead"):
            use(optimizer)
    optimizer.close()


@pytest.mark.parametrize("states", PLACES)
def test_version_counters_see_the_step(make: Make, states: str) -> None:
    model = net()
    optimizer = make(model.parameters(), states=states)
    once = loss(model)
    once.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        once.backward()
    optimizer.close()


@pytest.mark.parametrize("states", PLACES)
def test_user_hooks_see_whole_state_dicts(make: Make, states: str) -> None:
    model = net()
    optimizer = make(model.parameters(), states=states)
    seen: list[set[str]] = []
    optimizer.register_state_dict_post_hook(lambda _, d: seen.append(set(d["state"][0])))
    optimizer.register_load_state_dict_pre_hook(lambda _, d: seen.append(set(d["state"][0])))
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(set(o.state_dict())))
    loss(model).backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    whole = {"step", "exp_avg", "exp_avg_sq"}
    assert seen == [whole, whole, whole, {"state", "param_groups"}]
    optimizer.close()
