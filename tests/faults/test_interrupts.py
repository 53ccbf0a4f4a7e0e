"""An interrupt inside ``step()``: when it is caught, the step is whole or was not begun."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from interrupts import Interrupt, at_event, by_signal, handler, raise_it
from remote import make_remote
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.errors import PoisonedError

Run = tuple[nn.Sequential, AdamW]
STRIDE = 29
POLICY = PipelinePolicy(chunk_elements=64, backend="threads", depth=2)


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4))


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    torch.autograd.backward(model(torch.randn(3, 5, generator=generator)).square().mean())


def train(model: nn.Module, optimizer: AdamW, seeds: range) -> None:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def facts(model: nn.Module, optimizer: AdamW) -> list[torch.Tensor]:
    """Return weights, moments and step counts."""
    optimizer.wait()
    states = optimizer.state_dict()["state"].values()
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(t for s in states for t in s.values()),
    ]


def plain(steps: int) -> list[torch.Tensor]:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    return facts(model, optimizer)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


WANT = [plain(n) for n in range(5)]
KINDS: dict[str, dict[str, Any]] = {
    "none": {"overlap": "none"},
    "forward": {"overlap": "forward"},
    "backward": {"overlap": "backward"},
    "none, on disk": {"overlap": "none", "states": "disk"},
    "forward, on disk": {"overlap": "forward", "states": "disk"},
}


def begun(directory: Path, given: dict[str, Any]) -> Run:
    """Return a run with two steps taken and the gradients of a third."""
    model = net()
    if "states" in given:
        given = {**given, "dir": directory, "durability": "none"}
    optimizer = AdamW(model.parameters(), lr=1e-2, module=model, policy=POLICY, **given)
    train(model, optimizer, range(2))
    optimizer.zero_grad()
    backward(model, 2)
    return model, optimizer


def take(run: Run, number: int, happen: Callable[[], None]) -> bool | None:
    """Step and wait, interrupted at an event; was the step taken? None: there is no such event."""
    model, optimizer = run

    def act() -> None:
        optimizer.step()
        optimizer.wait()

    interrupted = False
    try:
        if not at_event(number, happen, act):
            return None
    except Interrupt:
        interrupted = True
    assert interrupted or happen is by_signal
    if optimizer._runtime.commits.step == 2:
        if optimizer.offload_policy.overlap != "backward":
            assert same(facts(model, optimizer), WANT[2])
        optimizer.step()  # with the gradients that are there still
        return False
    return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("remote", [False, True])
def test_an_interrupt_leaves_a_step_whole_or_not_begun(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, remote: bool
) -> None:
    if remote:
        make_remote(monkeypatch)
    outcomes = set()
    with handler(raise_it):
        for number in range(1, 5000, STRIDE):
            run = begun(tmp_path, KINDS[kind])
            taken = take(run, number, by_signal)
            if taken is None:
                break
            outcomes.add(taken)
            assert same(facts(*run), WANT[3]), number
            train(*run, range(3, 4))
            assert same(facts(*run), WANT[4]), number
            run[1].close()
    assert outcomes == {True, False}


@pytest.mark.parametrize("kind", ["none", "forward", "backward"])
def test_whatever_else_is_raised_in_a_step_poisons_it(kind: str, tmp_path: Path) -> None:
    """An exception that no signal brings: MemoryError, or one that another thread sets."""
    outcomes = set()
    for number in range(1, 5000, STRIDE):
        run = begun(tmp_path, KINDS[kind])
        try:
            taken = take(run, number, raise_it)
            if taken is None:
                break
            assert same(facts(*run), WANT[3]), number
            outcomes.add(str(taken))
        except PoisonedError as error:
            outcomes.add(str(error))
    (poisoned,) = outcomes - {"True", "False"}
    assert "Interrupt was raised" in poisoned
    assert "resume()" in poisoned


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
def test_an_interrupt_in_no_grad_leaves_gradients_on(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python looks for signals there too, between the switch and the way back."""
    model = net()
    optimizer = AdamW(model.parameters(), module=model, overlap=overlap)
    backward(model, 0)
    enter = torch.no_grad.__enter__

    def interrupted(self: torch.no_grad) -> None:
        enter(self)
        raise Interrupt

    with monkeypatch.context() as patch:
        patch.setattr(torch.no_grad, "__enter__", interrupted)
        with pytest.raises(Interrupt):
            optimizer.step()
    on = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    assert on
    optimizer.step()
    optimizer.close()
