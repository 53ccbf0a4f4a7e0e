"""Examples of ColossalAI's offload document: what the page has, restored, and how to run it."""

import difflib
import functools
import importlib.util
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tree import TESTS

SEEDS = TESTS / "seeds"


def bare_lines(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def difference(name: str) -> list[str]:
    """Return what was restored of an example, without blank lines and indentation."""
    scraped, restored = SEEDS / f"{name}_scraped.txt", SEEDS / f"{name}.py"
    before, after = bare_lines(scraped), bare_lines(restored)
    return list(difflib.unified_diff(before, after, scraped.name, restored.name, lineterm=""))


def changes(name: str) -> tuple[list[str], list[str]]:
    """Return the lines that were taken away, and those added but what quiets the linter."""
    lines = [x for x in difference(name) if not x.startswith(("---", "+++", "@@", " "))]
    added = [line[1:] for line in lines if line[0] == "+"]
    quiet = ("# ruff:", "# fmt:")
    return [x[1:] for x in lines if x[0] == "-"], [x for x in added if not x.startswith(quiet)]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"seed_{name}", SEEDS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Enough(Exception):  # noqa: N818  # nothing went wrong
    """Ends a run whose last loss is known: what comes behind it shows in no other."""


def losses_of(
    seed: ModuleType, monkeypatch: pytest.MonkeyPatch, fraction: float, *, enough: int | None = None
) -> list[float]:
    """Run the example as it stands, or up to ``enough`` losses; return them unrounded."""
    losses: list[float] = []
    forward = seed.GPTLMLoss.forward

    def noting(self: object, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = forward(self, logits, labels)
        losses.append(loss.item())
        if len(losses) == enough:
            raise Enough
        return loss

    (run,) = (getattr(seed, name) for name in dir(seed) if name.startswith("train_"))
    torch.manual_seed(7)
    with monkeypatch.context() as patch:
        patch.setattr(seed.GPTLMLoss, "forward", noting)
        with suppress(Enough):
            run(fraction)
    return losses


def shrink(seed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    small = functools.partial(
        seed.GPT2Config,
        vocab_size=211,
        n_embd=64,
        n_layer=2,
        n_head=2,
        n_positions=128,
        bos_token_id=0,
        eos_token_id=0,
    )
    monkeypatch.setattr(seed, "GPT2Config", small)
