from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tensorstow import Adam, AdamW, StowedOptimizer
from tensorstow.base.errors import DTypeError, OptionError
from tensorstow.base.update_on import Overlap
from tensorstow.optim import options
from tensorstow.step import validation

GOOD = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}


@pytest.mark.parametrize(
    ("states", "fraction"),
    [
        ("host", 0.0),
        ("ram", 0.0),
        ("disk", 1.0),
        ("cpu", 0.0),
        ("nvme", 1.0),
        (0.25, 0.25),
        (1, 1.0),
        (np.float32(0.5), 0.5),
    ],
)
def test_states_are_a_word_or_a_fraction(states: float, fraction: float) -> None:
    assert options.placement(states, None, None).disk_fraction == fraction


@pytest.mark.parametrize("states", ["tape", 1.5, -0.1, None, True, float("nan")])
def test_other_states_are_refused(states: float) -> None:
    with pytest.raises(OptionError, match="states="):
        options.placement(states, None, None)


MADE: dict[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": AdamW,
    "StowedOptimizer": lambda params: StowedOptimizer(torch.optim.SGD, params, states="ram"),
}


@pytest.mark.parametrize("kind", MADE)
@pytest.mark.parametrize(
    "given",
    [
        None,
        7,
        "a text",
        torch.ones(3),
        {},
        {"state": {}},
        {"param_groups": [{"params": [0]}]},
        {"state": {}, "param_groups": [{"lr": 0.1}]},
        {"state": {}, "param_groups": 3},
        {"state": {0: 5.0}, "param_groups": [{"params": [0]}]},
    ],
    ids=str,
)
def test_what_is_no_state_dict_is_refused_whole(kind: str, given: Any) -> None:  # noqa: ANN401
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = MADE[kind]([parameter])
    with pytest.raises(OptionError, match=r"load_state_dict\(\) was called with"):
        optimizer.load_state_dict(given)


@pytest.mark.parametrize(("key", "value"), [("lr", float("nan")), ("lr", "x"), ("betas", 0.9)])
def test_impossible_options_of_a_state_dict_are_refused_before_anything_changes(
    key: str, value: object
) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([parameter])
    parameter.grad = torch.ones(4)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["param_groups"][0][key] = value
    optimizer.step()
    with pytest.raises(OptionError, match=key):
        optimizer.load_state_dict(saved)
    assert optimizer.state[parameter]["step"] == 2
    assert optimizer.param_groups[0]["lr"] == 1e-3
    optimizer.step()


def test_directories_and_budget_are_read() -> None:
    placement = options.placement("disk", ["a", Path("b")], "512MiB")
    assert placement.directories == (Path("a"), Path("b"))
    assert placement.ram_budget == 512 << 20


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lr", -1.0),
        ("lr", float("nan")),
        ("eps", -1e-9),
        ("weight_decay", -0.1),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
        ("lr", torch.ones(2)),
        ("lr", "fast"),
    ],
)
def test_hyper_parameters_out_of_range_are_named(key: str, value: object) -> None:
    with pytest.raises(OptionError, match=key):
        validation.check_hyper({**GOOD, key: value})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("key", ["lr", "eps", "weight_decay"])
def test_what_is_no_finite_number_is_called_so(key: str, value: float) -> None:
    with pytest.raises(OptionError, match=f"{key}={value} was given: it must be finite"):
        AdamW([torch.nn.Parameter(torch.ones(2))], **{key: value})
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = AdamW([parameter])
    optimizer.param_groups[0][key] = value
    parameter.grad = torch.ones(2)
    with pytest.raises(OptionError, match="must be finite"):
        optimizer.step()
    assert torch.equal(parameter, torch.ones(2))


@pytest.mark.parametrize("given", [{"lr": 1e39}, {"weight_decay": 1e308}, {"eps": 10**400}])
def test_what_fp32_cannot_hold_is_refused_by_adam_and_by_other_classes(
    given: dict[str, float],
) -> None:
    (name,) = given
    parameter = torch.nn.Parameter(torch.ones(2))
    makers = [
        partial(AdamW, [parameter]),
        partial(StowedOptimizer, torch.optim.Adagrad, [parameter]),
    ]
    for make in makers:
        with pytest.raises(OptionError, match=f"^{name}=1.* must be finite in fp32"):
            make(**given)
        optimizer = make()
        optimizer.param_groups[0].update(given)
        parameter.grad = torch.ones(2)
        with pytest.raises(OptionError, match="must be finite in fp32"):
            optimizer.step()
        assert torch.equal(parameter, torch.ones(2))


@pytest.mark.parametrize(
    ("given", "product"),
    [
        ({"lr": 2.0**70, "weight_decay": 2.0**70}, r"lr \* weight_decay"),
        ({"lr": 1e38, "betas": (0.9, 0.999)}, r"lr / \(1 - betas\[0\]\)"),
    ],
)
def test_products_that_fp32_cannot_hold_are_refused(given: dict[str, Any], product: str) -> None:
    with pytest.raises(OptionError, match=product):
        AdamW([torch.nn.Parameter(torch.ones(2))], **given)


def test_a_bool_is_no_rate() -> None:
    for value in (True, torch.tensor(True)):  # noqa: FBT003
        with pytest.raises(OptionError, match=r"lr=.* it must be a number"):
            AdamW([torch.nn.Parameter(torch.ones(2))], lr=value)


@pytest.mark.parametrize("beta", [float("nan"), float("inf"), 1.0])
def test_a_beta_out_of_range_is_told_the_range(beta: float) -> None:
    with pytest.raises(OptionError, match=r"betas\[1\]=.* must be at least 0 and below 1"):
        AdamW([torch.nn.Parameter(torch.ones(2))], betas=(0.9, beta))


def test_numbers_of_numpys_are_numbers() -> None:
    validation.check_hyper({**GOOD, "lr": np.float32(1e-3), "weight_decay": np.int64(0)})


@pytest.mark.parametrize("key", ["foreach", "capturable", "differentiable"])
def test_torch_keywords_that_cannot_hold_are_refused_by_name(key: str) -> None:
    with pytest.raises(OptionError, match=key):
        validation.refuse_torch_keywords({key: True})
    validation.refuse_torch_keywords({key: False})


@pytest.mark.parametrize("key", ["maximize", "amsgrad", "fused", "foreach"])
@pytest.mark.parametrize("value", ["yes", 1, 0.0])
def test_a_flag_is_true_or_false(key: str, value: object) -> None:
    with pytest.raises(OptionError, match=f"{key}=.*: it is True or False"):
        validation.refuse_torch_keywords({key: value})


@pytest.mark.parametrize("fused", [False, True, None])
def test_fused_means_nothing_here(*, fused: bool | None) -> None:
    off = {"foreach": False, "capturable": False, "differentiable": False}
    validation.refuse_torch_keywords({**off, "fused": fused})


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (torch.zeros(2, dtype=torch.float64), "float64"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, device="meta"), "to_empty"),
        (torch.zeros(4, 4).t()[:, :2], "contiguous"),
    ],
)
def test_parameters_that_cannot_be_updated(parameter: torch.Tensor, words: str) -> None:
    with pytest.raises(DTypeError, match=words):
        validation.check_parameter(parameter, "Parameter 0")


def test_gradients_that_cannot_be_read() -> None:
    parameter = torch.zeros(2, 2)
    with pytest.raises(DTypeError, match="sparse"):
        validation.check_gradient(parameter, parameter.to_sparse(), "w")
    with pytest.raises(DTypeError, match="float64"):
        validation.check_gradient(parameter, parameter.double(), "w")
    with pytest.raises(DTypeError, match="meta"):
        validation.check_gradient(parameter, torch.zeros(2, 2, device="meta"), "w")


def test_fp32_parameters_take_16_bit_gradients_once_named() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    validation.accept_grad_dtype([parameter], torch.float16)
    (parameter * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.dtype == torch.float16
    assert parameter.grad.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(DTypeError, match="grad_dtype"):
        validation.accept_grad_dtype([parameter], torch.int8)


@pytest.mark.parametrize("given", [{"extra": 5}, {"module": 5}, {"extra": {"a": 1}}])
def test_what_is_no_model_and_no_function_is_refused_at_once(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="was given: pass"):
        AdamW([torch.nn.Parameter(torch.ones(3))], **given)


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_a_module_of_none_of_the_parameters_is_refused(overlap: Overlap, tmp_path: Path) -> None:
    model, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    given: dict[str, Any] = {"states": "disk", "dir": tmp_path, "overlap": overlap}
    with pytest.raises(OptionError, match=r"Linear with 2 parameters, and none of .* 2 is among"):
        AdamW(other.parameters(), module=model, **given)
    assert list(tmp_path.iterdir()) == []
    # Some may be outside: they are new when step() returns.
    AdamW([*model.parameters(), *other.parameters()], module=model, **given).close()


def test_extra_is_a_dict(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(TypeError, match="extra is a NoneType"):
        AdamW([weight], states="disk", dir=tmp_path, extra=lambda: None)  # type: ignore[arg-type, return-value]
    optimizer = AdamW([weight], states="disk", dir=tmp_path)
    with pytest.raises(TypeError, match="extra is a list"):
        optimizer.commit([1, 2])  # type: ignore[arg-type]
    assert optimizer.commit({}) == 0
    optimizer.close()


def test_states_are_in_memory_by_default_with_every_optimizer() -> None:
    weights = [torch.nn.Parameter(torch.ones(3))]
    for make in (Adam, AdamW, partial(StowedOptimizer, torch.optim.SGD, lr=1.0)):
        assert make(weights).placement_of_states == "host"
