"""A typo in a parameter group is an error; keys of the user's own are kept."""

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow.base.errors import OptionError
from tensorstow.optim.options import check_keys

KNOWN = ("lr", "betas", "eps", "weight_decay", "amsgrad")


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("weight_decya", "weight_decay"),
        ("weigth_decay", "weight_decay"),
        ("weightdecay", "weight_decay"),
        ("beta", "betas"),
        ("amsgard", "amsgrad"),
        ("intial_lr", "initial_lr"),
    ],
)
def test_a_typo_is_an_error_with_the_nearest_name(key: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"{key}=0.1.*{meant!r}"):
        check_keys({"params": [], key: 0.1}, KNOWN)


@pytest.mark.parametrize("key", ["name", "lr_scale", "lr_mult", "wd_mult", "max_lr", "layer"])
def test_keys_of_the_users_own_are_kept(key: str) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = tensorstow.AdamW([{"params": [weight], key: 0.1}])
    assert optimizer.param_groups[0][key] == 0.1


def test_what_is_said_of_the_whole_optimizer_is_refused_in_a_group() -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.raises(OptionError, match=r"states='disk' .* AdamW\(groups, states=\.\.\.\)"):
        tensorstow.AdamW([{"params": [weight], "states": "disk"}])


def test_groups_made_for_stow_and_added_later_are_checked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(OptionError, match="weight_decay"):
        tensorstow.stow(
            model, lambda named, **k: tensorstow.AdamW([{"params": named, "weight_deacy": 0}], **k)
        )
    optimizer = tensorstow.AdamW(model[0].parameters())
    with pytest.raises(OptionError, match="weight_decay"):
        optimizer.add_param_group({"params": list(model[1].parameters()), "weight_deacy": 0})
    assert len(optimizer.param_groups) == 1
