"""Which optimizer a configuration or a user means."""

from functools import partial

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Named
from tensorstow.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from tensorstow.deepspeed.optimizers import maker_of, of_named


def layer() -> nn.Module:
    return nn.Linear(3, 2)


def made(model: nn.Module, make: object) -> tensorstow.AdamW | tensorstow.Adam:
    return make(list(model.named_parameters()))


@pytest.mark.parametrize(
    ("named", "kind", "decay"),
    [
        (Named("Adam"), tensorstow.AdamW, 0.0),
        (Named("Adam", {"adam_w_mode": False}), tensorstow.Adam, 0.0),
        (Named("AdamW", {"adam_w_mode": False}), tensorstow.AdamW, 0.0),
        (Named("AdamW", {"torch_adam": True}), tensorstow.AdamW, 0.01),
        (Named("adam", {"torch_adam": True, "adam_w_mode": False}), tensorstow.Adam, 0.0),
        (Named("AdamW", {"weight_decay": 0.3}), tensorstow.AdamW, 0.3),
    ],
)
def test_a_type_is_read_as_deepspeed_does(named: Named, kind: type, decay: float) -> None:
    optimizer = made(layer(), of_named(named))
    assert type(optimizer) is kind
    assert optimizer.param_groups[0]["weight_decay"] == decay


@pytest.mark.parametrize(
    ("named", "match"),
    [
        (Named("AdamW", {"learning_rate": 1.0}), "learning_rate was given"),
        (Named("AdamW", {"max_grad_norm": 0}), "write it as gradient_clipping"),
    ],
)
def test_what_is_not_here_is_refused_by_name(named: Named, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        of_named(named)


def test_groups_keep_their_options_and_names() -> None:
    model = layer()
    groups = [
        {"params": [model.weight], "weight_decay": 0.1},
        {"params": model.bias, "lr": 0.5},
    ]
    make = maker_of(Named("AdamW", {"lr": 0.2}), None, model, groups)
    first, second = made(model, make).param_groups
    assert (first["lr"], first["weight_decay"], first["param_names"]) == (0.2, 0.1, ["weight"])
    assert (second["lr"], second["weight_decay"], second["param_names"]) == (0.5, 0.0, ["bias"])


def test_frozen_parameters_are_left_out() -> None:
    model = layer()
    model.bias.requires_grad_(requires_grad=False)
    (group,) = made(model, maker_of(Named("AdamW"), None, model)).param_groups
    assert group["param_names"] == ["weight"]


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_an_optimizer_of_torch_s_is_taken_over(kind: str) -> None:
    model = layer()
    old = getattr(torch.optim, kind)([{"params": [model.bias], "lr": 0.3}], eps=1e-5)
    new = made(model, maker_of(None, old, model))
    assert type(new).__name__ == kind
    (group,) = new.param_groups
    assert (group["lr"], group["eps"], group["param_names"]) == (0.3, 1e-5, ["bias"])


def test_moments_may_be_left_uncorrected() -> None:
    (group,) = made(layer(), of_named(Named("Adam", {"bias_correction": False}))).param_groups
    assert group["bias_correction"] is False


def test_an_optimizer_of_ours_is_made_anew() -> None:
    model = layer()
    old = DeepSpeedCPUAdam(model.parameters(), lr=0.3, bias_correction=False, adamw_mode=False)
    new = made(model, maker_of(None, old, model))
    assert type(new) is tensorstow.Adam
    (group,) = new.param_groups
    assert (group["lr"], group["bias_correction"]) == (0.3, False)


def test_functions_of_both_kinds_are_called() -> None:
    model = layer()
    for function in (
        partial(tensorstow.AdamW, lr=0.3),
        partial(torch.optim.AdamW, lr=0.3),
        partial(FusedAdam, lr=0.3),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.3),
    ):
        new = made(model, maker_of(None, function, model, model.parameters()))
        assert new.param_groups[0]["decoupled_weight_decay"]
        assert new.param_groups[0]["lr"] == 0.3


def test_other_classes_are_made_by_a_maker_of_their_own() -> None:
    model = layer()
    for given in (
        maker_of(None, torch.optim.SGD(model.parameters(), lr=0.3), model),
        maker_of(None, partial(torch.optim.SGD, lr=0.3), model),
        maker_of(Named("SGD", {"lr": 0.3}), None, model),
    ):
        assert (given.optimizer_class, given.options["lr"]) == (torch.optim.SGD, 0.3)
        assert [group["params"] for group in given.groups] == [["weight", "bias"]]
    with pytest.raises(OptionError, match="optimizer=int was given"):
        maker_of(None, 3, model)
    assert maker_of(None, None, model) is None


def test_an_optimizer_that_has_taken_steps_is_refused() -> None:
    model = layer()
    old = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    old.step()
    with pytest.raises(OptionError, match="taken steps"):
        maker_of(None, old, model)


def test_a_stranger_s_parameter_is_refused() -> None:
    with pytest.raises(OptionError, match="not one of the model's"):
        maker_of(Named("AdamW"), None, layer(), layer().parameters())
