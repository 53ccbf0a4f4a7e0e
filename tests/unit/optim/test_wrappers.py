"""Wrappers whose class is made from ours: what they are told, the optimizer is told."""

import ast
import copy
import gc
import inspect
import json
import textwrap
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorstow.colossalai
import tensorstow.deepspeed  # noqa: F401  # subclasses
from tensorstow import AdamW, StowedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam


class Delegating:
    """As Lightning's and Fabric's: a class of both, which asks the real one for what it lacks."""

    def __init__(self, optimizer: Any) -> None:  # noqa: ANN401
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Wrapped{kind.__name__}", (type(self), kind), {})

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the real one has
        return getattr(self._optimizer, name)


class Sharing:
    """As Lightning's before 2.0: it shares what was in the real one's ``__dict__`` when made."""

    def __init__(self, optimizer: Any) -> None:  # noqa: ANN401
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k != "step"}
        kind = type(optimizer)
        self.__class__ = type(f"Wrapped{kind.__name__}", (type(self), kind), {})
        self._optimizer = optimizer


class Holding(torch.optim.Optimizer):
    """As accelerate's: an Optimizer that holds the real one, and moves its state dict."""

    def __init__(self, optimizer: Any) -> None:  # noqa: ANN401
        self.optimizer = optimizer
        optimizer.load_state_dict(optimizer.state_dict())

    def step(self, closure: Any = None) -> None:  # noqa: ANN401
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  # torch's
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.optimizer, name)


WRAPPERS: list[Any] = [Delegating, Sharing, Holding]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def backward(net: nn.Module) -> None:
    torch.autograd.backward(net(torch.ones(2, 8)).square().mean())


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


def clipped(net: nn.Module, optimizer: AdamW, told: AdamW) -> dict[str, Tensor]:
    for max_norm in (0.01, 1e-9, 1e9):
        backward(net)
        told.clip_grad_norm_(max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_clipping_through_a_wrapper_clips(wrapper: Any) -> None:  # noqa: ANN401
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    want = clipped(net, optimizer, optimizer)
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2, eps=1e-3)
    found = clipped(net, optimizer, wrapper(optimizer))
    assert all(torch.equal(found[name], want[name]) for name in want)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_zero_grad_through_a_wrapper_forgets_the_factor(
    wrapper: Any,  # noqa: ANN401
) -> None:
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    told = wrapper(optimizer)
    backward(net)
    optimizer.clip_grad_norm_(1e-9)
    told.zero_grad()
    assert optimizer._runtime.steps.clip.of_now() == 1.0


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_run_is_resumed_through_a_wrapper(wrapper: Any, tmp_path: Path) -> None:  # noqa: ANN401
    net = model()
    optimizer = AdamW(net.parameters(), dir=tmp_path, module=net)
    told = wrapper(optimizer)
    backward(net)
    told.step()
    told.commit(extra={"epoch": 3})
    optimizer.close()
    net = model()
    optimizer = AdamW(net.parameters(), dir=tmp_path, module=net)
    told = wrapper(optimizer)
    assert told.resume() == 1
    assert told.extra == optimizer.extra == {"epoch": 3}
    optimizer.close()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_state_dict_is_loaded_through_a_wrapper(wrapper: Any) -> None:  # noqa: ANN401
    net = model()
    optimizer = AdamW(net.parameters(), lr=1e-2)
    told = wrapper(optimizer)
    backward(net)
    optimizer.step()
    saved = copy.deepcopy(told.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    told.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups is told.param_groups
    assert len(optimizer.state) == 4


def adamw(net: nn.Module) -> AdamW:
    return AdamW(net.parameters(), lr=1e-2, eps=1e-3, module=net)


def stowed_sgd(net: nn.Module) -> StowedOptimizer:
    return StowedOptimizer(torch.optim.SGD, net.parameters(), lr=1e-2, momentum=0.9, states="host")


MAKERS: list[Any] = [adamw, stowed_sgd]


def figures(files: dict[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(files["figures"].read_text())
    return found


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("wrapper", [Delegating, Sharing])
def test_a_recording_through_a_wrapper_is_reported_by_the_optimizer(
    wrapper: Any,  # noqa: ANN401
    make: Any,  # noqa: ANN401
    tmp_path: Path,
) -> None:
    net = model()
    optimizer = make(net)
    told = wrapper(optimizer)
    with told.recording(net):
        backward(net)
        told.step()
    del told
    gc.collect()
    for reporter in (optimizer, wrapper(optimizer)):
        found = figures(reporter.report(tmp_path))
        assert found["steps"] == 1
        assert found["title"] == f"tensorstow: a run of {type(optimizer).__name__}"


@pytest.mark.parametrize("make", MAKERS)
def test_an_optimizer_that_was_recorded_ends_with_its_last_user(make: Any) -> None:  # noqa: ANN401
    net = model()
    optimizer = make(net)
    with optimizer.recording():
        backward(net)
        optimizer.step()
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("wrapper", [Delegating, Sharing])
def test_groups_of_any_class_are_loaded_through_a_wrapper(wrapper: Any) -> None:  # noqa: ANN401
    net = model()
    optimizer = stowed_sgd(net)
    told = wrapper(optimizer)
    backward(net)
    optimizer.step()
    saved = copy.deepcopy(told.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    told.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups is told.param_groups
    assert len(optimizer.state) == 4


def run(net: nn.Module, place: Path, told: Callable[[AdamW], Any]) -> dict[str, Tensor]:
    """Clip, step, commit, record and resume, all through what ``told`` returns each time."""
    optimizer = AdamW(net.parameters(), lr=1e-2, eps=1e-3, dir=place, module=net)
    for factor in (0.01, 1e9, 0.5):
        backward(net)
        told(optimizer).clip_grad_norm_(factor)
        gc.collect()
        with told(optimizer).recording():
            told(optimizer).step()
        told(optimizer).zero_grad()
        gc.collect()
        told(optimizer).commit(extra={"factor": factor})
    assert told(optimizer).resume() == 3
    gc.collect()
    assert told(optimizer).extra == optimizer.extra == {"factor": 0.5}
    assert figures(told(optimizer).report(place.with_suffix(".report")))["steps"] == 1
    backward(net)
    told(optimizer).step()
    optimizer.close()
    return weights(net)


@pytest.mark.parametrize("wrapper", [Delegating, Sharing])
def test_a_run_through_wrappers_made_for_each_call_has_the_same_bits(
    wrapper: Any,  # noqa: ANN401
    tmp_path: Path,
) -> None:
    want = run(model(), tmp_path / "plain", lambda optimizer: optimizer)
    found = run(model(), tmp_path / "wrapped", wrapper)
    assert all(torch.equal(found[name], want[name]) for name in want)


def classes(base: type) -> Iterator[type]:
    yield base
    for each in base.__subclasses__():
        if each.__module__.startswith("tensorstow."):
            yield from classes(each)


@pytest.mark.parametrize("base", [StowedAdam, StowedOptimizer])
def test_methods_assign_no_attributes(base: type) -> None:
    """``self`` may be a wrapper: what a method assigned there, the optimizer would not have."""
    assigned = {
        f"{owner.__name__}.{method.name}: {ast.unparse(node)}"
        for owner in classes(base)
        for method in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(owner))))
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and not isinstance(node.ctx, ast.Load)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    assert not assigned
