"""A caller that computes on the host's cores updates what is ready between its computations."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from parity.beside import blocks, in_ram, mean_square, optimizer_for, same, train, weights
from tensorstow.base.update_on import Overlap
from tensorstow.states.native_pipeline import StepKind, UpdatePipeline


def watch(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Record the callers of steps, and calls of ``help``."""
    help_, step = UpdatePipeline.help, UpdatePipeline.step

    def helped(self: UpdatePipeline) -> None:
        calls.append("help")
        help_(self)

    def stepped(self: UpdatePipeline, rows: Any, scalars: Any, *kind: StepKind) -> None:  # noqa: ANN401
        calls.extend(k.caller for k in kind)
        step(self, rows, scalars, *kind)

    monkeypatch.setattr(UpdatePipeline, "help", helped)
    monkeypatch.setattr(UpdatePipeline, "step", stepped)


@pytest.mark.parametrize("overlap", ["backward", "forward"])
def test_hooks_of_gradients_and_modules_help(
    overlap: Overlap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, overlap)
    train(optimizer, model, range(2))
    calls: list[str] = []
    watch(monkeypatch, calls)
    optimizer.zero_grad()
    loss = mean_square(model, 2)
    if overlap == "backward":
        calls.clear()
    torch.autograd.backward(loss)
    if overlap == "backward":  # each final gradient
        assert calls[0] == "helps"
        assert calls.count("help") >= len(list(model.parameters()))
    optimizer.step()
    optimizer.zero_grad()
    if overlap == "forward":  # each module
        model(torch.ones(1, 32))
        after = calls[calls.index("helps") :]
        assert after.count("help") >= sum(isinstance(m, nn.Linear) for m in model.modules())
    optimizer.wait()
    assert same(weights(model), in_ram(blocks(), range(3)))
    optimizer.close()


def test_a_closed_optimizer_helps_nothing(tmp_path: Path) -> None:
    model = blocks()
    optimizer = optimizer_for(model, tmp_path, "forward")
    train(optimizer, model, range(1))
    pipeline = optimizer._states().pipeline
    optimizer.close()
    pipeline.help()
