import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR

from tensorstow import AdamW
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.optimizer_factory import groups_of, move_schedule, names_of, with_groups


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_groups_keep_every_key_but_the_choice_of_kernels() -> None:
    model = model_of()
    given = torch.optim.Adam([{"params": model.parameters(), "mine": 1}], foreach=False)
    (group,) = groups_of(given)
    assert group["mine"] == 1
    assert {"foreach", "fused", "capturable", "differentiable"}.isdisjoint(group)
    assert group.keys() >= {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"}


def test_groups_are_over_the_same_names() -> None:
    model, other = model_of(), model_of()
    reverse = list(model.parameters())[::-1]
    groups = names_of(model, groups_of(torch.optim.Adam(reverse, lr=0.5)))
    assert groups[0]["params"] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    made = with_groups(AdamW, groups)(other.named_parameters(), weight_decay=0.25)
    assert [id(p) for p in made.param_groups[0]["params"]] == [
        id(p) for p in list(other.parameters())[::-1]
    ]
    assert made.param_groups[0]["lr"] == 0.5
    assert made.param_groups[0]["weight_decay"] == 0.0  # the group's own says more
    with pytest.raises(OptionError, match="Parameter 0 of a group is not one of the model's"):
        names_of(other, groups_of(torch.optim.Adam(model.parameters())))


def test_states_are_not_carried_along() -> None:
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(OptionError, match="has taken steps"):
        groups_of(optimizer)


@pytest.mark.filterwarnings("error")
def test_schedulers_inside_others_go_on_too() -> None:
    before, after = (torch.optim.SGD(model_of().parameters(), lr=1.0) for _ in range(2))
    chained = ChainedScheduler([ConstantLR(before, 0.5, 2), ExponentialLR(before, 0.1)])
    after.param_groups[0].update(groups_of(before)[0] | {"params": after.param_groups[0]["params"]})
    move_schedule(chained, after)
    for _ in range(3):
        after.step()
        chained.step()
    assert after.param_groups[0]["lr"] == pytest.approx(1e-3)
    assert before.param_groups[0]["lr"] == 0.5


def test_a_scheduler_without_an_optimizer_is_left_alone() -> None:
    after = torch.optim.SGD(model_of().parameters(), lr=1.0)
    move_schedule(object(), after)
    assert "initial_lr" not in after.param_groups[0]


@pytest.mark.parametrize("first", [False, True])
def test_a_group_may_be_empty(first: bool) -> None:  # noqa: FBT001
    model = nn.Linear(2, 2)
    groups = [{"params": list(model.parameters())}, {"params": [], "weight_decay": 0.0}]
    named = names_of(model, groups[::-1] if first else groups)
    made = with_groups(AdamW, named)(model.named_parameters())
    assert sorted(len(group["params"]) for group in made.param_groups) == [0, 2]
    model(torch.ones(2)).sum().backward()
    made.step()
    made.close()
