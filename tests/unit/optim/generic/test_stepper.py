"""The class's own step, over the parameters that it is given."""

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensorstow.base.errors import OptionError
from tensorstow.optim.generic.stepper import StepBatch, Stepper, listed


def weight(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(shape))
    parameter.grad = torch.ones(shape)
    return parameter


def stepper_for(optimizer_class: type[optim.Optimizer], **options: float) -> Stepper:
    return Stepper(optimizer_class, [{"params": [weight(30, 40)]}], options)


def test_it_steps_what_it_is_given_and_keeps_nothing() -> None:
    stepper = stepper_for(optim.SGD, lr=1.0, momentum=0.5)
    p, group = weight(4), stepper.group_options[0]
    first = stepper.run([StepBatch(group, [(p, {})])])[0][0]
    second = stepper.run([StepBatch(group, [(p, first)])])[0][0]
    assert (p == 1 - 1 - 1.5).all()
    assert (second["momentum_buffer"] == 1.5).all()
    assert not stepper.inner.state
    assert not stepper.inner.param_groups


def test_nothing_is_allocated_for_the_parameters_it_is_shaped_by() -> None:
    huge = nn.Parameter(torch.empty(1 << 40, device="meta"))
    stepper = Stepper(optim.Adagrad, [{"params": [huge]}], {})
    assert stepper.begins_with_states
    assert stepper.defaults == optim.Adagrad([weight(1)]).defaults


@pytest.mark.parametrize(
    ("optimizer_class", "names"),
    [
        (optim.AdamW, {"step", "exp_avg", "exp_avg_sq"}),
        (optim.Adafactor, {"step", "row_var", "col_var"}),
        (optim.ASGD, {"step", "eta", "mu", "ax"}),
        (optim.SGD, set()),
    ],
)
def test_states_are_told_before_the_first_step(
    optimizer_class: type[optim.Optimizer], names: set[str]
) -> None:
    stepper = stepper_for(optimizer_class)
    p = weight(30, 40)
    expected = stepper.expected_entry(stepper.group_options[0], p)
    assert expected.keys() == names
    assert (p == 1).all()
    made = stepper.run([StepBatch(stepper.group_options[0], [(p, {})])])[0][0]
    assert {k: v.shape for k, v in made.items()} == {k: v.shape for k, v in expected.items()}


def test_global_hooks_are_not_called_for_pieces() -> None:
    stepper = stepper_for(optim.Adam)
    calls: list[object] = []
    hook = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        stepper.run([StepBatch(stepper.group_options[0], [(weight(4), {})])])
    finally:
        hook.remove()
    assert not calls


def test_a_class_that_regroups_is_refused() -> None:
    class Regroups(optim.SGD):
        def __init__(self, params: list[dict[str, list[nn.Parameter]]]) -> None:
            super().__init__([{"params": [p]} for group in params for p in group["params"]])

    with pytest.raises(OptionError, match="groups of its own"):
        Stepper(Regroups, [{"params": [weight(1), weight(1)]}], {})


def test_old_entries_are_repaired_by_the_class() -> None:
    stepper = stepper_for(optim.Adam)
    p = weight(4)
    groups = [{"params": [p], "lr": 0.1}]
    entry = {"step": 3, "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    stepper.repair(groups, {p: entry})
    assert torch.is_tensor(entry["step"])
    assert groups[0]["amsgrad"] is False


def test_parameters_are_listed_once() -> None:
    a, b = weight(1), weight(2)
    assert listed(iter([a, b])) == ([a, b], [{"params": [a, b]}])
    assert listed([("a", a)])[1] == [{"params": [a], "param_names": ["a"]}]
    given, groups = listed([{"params": iter([a, b]), "lr": 1}])
    assert given == groups == [{"params": [a, b], "lr": 1}]
    with pytest.raises(OptionError, match="list"):
        listed(a)
