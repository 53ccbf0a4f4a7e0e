"""States by the model's names."""

import torch
from torch import nn

import tensorstow
from tensorstow.deepspeed.states import drop_unused_masters, owned_names, set_states, states_of
from tensorstow.step.step_plan import as_step


def stepped() -> tuple[nn.Module, tensorstow.AdamW]:
    model = nn.Linear(3, 2)
    optimizer = tensorstow.AdamW([model.bias, model.weight])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_names_are_in_the_optimizer_s_order() -> None:
    model, optimizer = stepped()
    assert owned_names(model, optimizer) == ["bias", "weight"]
    assert states_of(model, optimizer)["weight"]["exp_avg"].shape == (2, 3)
    optimizer.close()


def test_states_that_are_put_are_stepped_from() -> None:
    model, optimizer = stepped()
    states = states_of(model, optimizer)
    states["bias"]["exp_avg"] = torch.full((2,), 5.0)
    set_states(model, optimizer, {"bias": states["bias"]})
    model.zero_grad()
    model.bias.grad = torch.zeros(2)
    optimizer.step()
    assert torch.allclose(states_of(model, optimizer)["bias"]["exp_avg"], torch.full((2,), 4.5))
    optimizer.close()


def test_states_that_no_step_has_begun_are_forgotten() -> None:
    model, optimizer = stepped()
    optimizer.state[model.bias] = {"step": as_step(0)}
    drop_unused_masters(optimizer)
    assert list(optimizer.state) == [model.weight]
    optimizer.close()
