"""Weights that are NaN while they are not pinned: a use at that time is found."""

from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagers import let_attributes_be_pagers
from parity.beside import blocks, mean_square, same, weights
from parity.cover import crossed
from remote import make_remote
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.update_on import Overlap

DEPTH = 5
SKIPPED = {1: "2.bias", 3: "0.weight"}
"""Gradients that do not come, by step."""


@pytest.fixture(autouse=True)
def _pagers(monkeypatch: pytest.MonkeyPatch) -> None:
    let_attributes_be_pagers(monkeypatch)


class Pages:
    """A block's weights, which are there while somebody has a pin."""

    def __init__(self, module: nn.Module) -> None:
        self.tensors = [p.data for p in module.parameters()]
        self.pins = 0
        self.nbytes = sum(t.nbytes for t in self.tensors)
        self._away()
        for parameter in module.parameters():
            parameter.pager = self  # type: ignore[assignment]

    def _away(self) -> None:
        self.saved = [t.clone() for t in self.tensors]
        for tensor in self.tensors:
            tensor.fill_(torch.nan)

    def expect(self, following: Sequence["Pages"]) -> None:
        """Do nothing."""

    def can_pin(self, nbytes: int) -> bool:
        """Have room."""
        return nbytes > 0

    def pin(self, *, for_write: bool = False) -> None:
        """Put them back."""
        del for_write
        if self.pins == 0:
            assert all(t.isnan().all() for t in self.tensors), "written while they were away"
            for tensor, saved in zip(self.tensors, self.saved, strict=True):
                tensor.copy_(saved)
            self.changed = False
        self.pins += 1

    def unpin(self, *, dirty: bool = False) -> None:
        """Take them away; what was changed and not said to be is lost."""
        self.changed |= dirty
        self.pins -= 1
        if self.pins == 0:
            if not self.changed:
                for tensor, saved in zip(self.tensors, self.saved, strict=True):
                    tensor.copy_(saved)
            self._away()


@contextmanager
def all_of(pages: Sequence[Pages]) -> Any:  # noqa: ANN401
    """Let all weights be there inside."""
    with ExitStack() as stack:
        for page in pages:
            page.pin(for_write=True)
            stack.callback(page.unpin)
        yield


def step(model: nn.Module, optimizer: AdamW, number: int, pages: Sequence[Pages] = ()) -> None:
    """Take a step by gradients that were made elsewhere."""
    named = dict(model.named_parameters())
    with all_of(pages):
        found = torch.autograd.grad(mean_square(model, number), list(named.values()))
    for (name, parameter), gradient in zip(named.items(), found, strict=True):
        parameter.grad = None if SKIPPED.get(number) == name else gradient
    optimizer.step()


def made(model: nn.Module, directory: Path, **given: Any) -> AdamW:  # noqa: ANN401
    policy = PipelinePolicy(chunk_elements=1024, backend="threads", depth=4)
    return AdamW(
        model.parameters(),
        lr=1e-2,
        states="disk",
        dir=directory,
        module=model,
        policy=policy,
        commit_every=given.pop("commit_every", None),
        **given,
    )


def wanted(steps: int) -> dict[str, Tensor]:
    model = blocks(depth=DEPTH)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for number in range(steps):
        step(model, optimizer, number)
    return weights(model)


@crossed(overlap=("none", "backward"), remote=((), (1,), (0, 4)), resumed=(False, True))
def test_weights_are_used_while_they_are_pinned_and_no_longer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    overlap: Overlap,
    remote: tuple[int, ...],
    *,
    resumed: bool,
) -> None:
    model, begun = blocks(depth=DEPTH), 0
    if resumed:  # in chunks of several blocks' states, which stay as they are
        optimizer = made(model, tmp_path)
        step(model, optimizer, 0)
        optimizer.commit()
        optimizer.close()
        model, begun = blocks(depth=DEPTH), 1
    away = {id(p) for n in remote for p in model[n].parameters()}
    make_remote(monkeypatch, lambda p: id(p) in away)
    pages = [Pages(model[n]) for n in (1, 2, 4) if n not in remote]
    optimizer = made(model, tmp_path, overlap=overlap, commit_every=3)
    assert (optimizer.resume() or 0) == begun
    for number in range(begun, 4):  # the third commits
        step(model, optimizer, number, pages)
    optimizer.commit()
    with all_of(pages):
        got = weights(model)
    assert same(got, wanted(4))
    assert not any(page.pins for page in pages)
    optimizer.close()

    model = blocks(depth=DEPTH)
    monkeypatch.undo()
    optimizer = made(model, tmp_path)
    assert optimizer.resume() == 4
    assert same(weights(model), got)
    step(model, optimizer, 4)
    assert same(weights(model), wanted(5))
    optimizer.close()
