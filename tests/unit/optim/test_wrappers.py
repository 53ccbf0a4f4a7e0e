"""Wrappers whose class is made from ours: what they are told, the optimizer is told."""

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensorstow import AdamW


class Delegating:
    """As Lightning's and Fabric's: a class of both, which asks the real one for what it lacks."""

    def __init__(self, optimizer: AdamW) -> None:
        self._optimizer = optimizer
        kind = type(optimizer)
        self.__class__ = type(f"Wrapped{kind.__name__}", (type(self), kind), {})

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  # whatever the real one has
        return getattr(self._optimizer, name)


class Sharing:
    """As Lightning's before 2.0: it shares what was in the real one's ``__dict__`` when made."""

    def __init__(self, optimizer: AdamW) -> None:
        self.__dict__ = {k: v for k, v in vars(optimizer).items() if k != "step"}
        kind = type(optimizer)
        self.__class__ = type(f"Wrapped{kind.__name__}", (type(self), kind), {})
        self._optimizer = optimizer


class Holding(torch.optim.Optimizer):
    """As accelerate's: an Optimizer that holds the real one, and moves its state dict."""

    def __init__(self, optimizer: AdamW) -> None:
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
    assert optimizer._core.steps.clip.of_now() == 1.0


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


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_that_is_dropped_ends_nothing(wrapper: Any, tmp_path: Path) -> None:  # noqa: ANN401
    net = model()
    optimizer = AdamW(net.parameters(), states="disk", dir=tmp_path, module=net, overlap="forward")
    told = wrapper(optimizer)
    backward(net)
    told.step()
    del told
    gc.collect()
    backward(net)
    optimizer.step()
    optimizer.close()
