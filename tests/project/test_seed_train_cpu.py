"""ColossalAI's offload document: its CPU example runs with only the import lines changed.

The published page lost lines on the way here. `seeds/train_cpu_scraped.txt` quotes what was left,
`seeds/train_cpu.py` is the example restored, and `seeds/train_cpu.diff` is the difference between
the two: blank lines and indentation, which the page lost too, left aside.

Write the difference anew with `python tests/project/test_seed_train_cpu.py`.
"""

import difflib
import functools
import importlib.util
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tree import TESTS

SEEDS = TESTS / "seeds"
RESTORED, SCRAPED, DIFF = (
    SEEDS / name for name in ("train_cpu.py", "train_cpu_scraped.txt", "train_cpu.diff")
)

# What the page lost: nothing else may be added but imports and what quiets this house's linter.
LOST_LINES = {
    "super().__init__()",
    "shift_labels.view(-1))",
    "device=device)",
    "loss.backward()",
    "optimizer.step()",
    "optimizer.zero_grad()",
}


def bare_lines(path: Path) -> list[str]:
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


def difference() -> list[str]:
    before, after = bare_lines(SCRAPED), bare_lines(RESTORED)
    return list(difflib.unified_diff(before, after, SCRAPED.name, RESTORED.name, lineterm=""))


def test_the_difference_shown_is_the_difference() -> None:
    assert DIFF.read_text(encoding="utf-8").splitlines() == difference()


def test_only_import_lines_are_changed_and_only_lost_lines_added() -> None:
    changes = [line for line in difference() if not line.startswith(("---", "+++", "@@", " "))]
    removed = [line[1:] for line in changes if line[0] == "-"]
    added = [line[1:] for line in changes if line[0] == "+"]
    assert removed
    assert all("colossalai" in line and "import" in line for line in removed)
    not_ours = [line for line in added if not line.startswith(("# ruff:", "# fmt:"))]
    assert set(not_ours) == LOST_LINES | {"from tensorstow.colossalai import HybridAdam"}


def load_seed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("seed_train_cpu", RESTORED)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    pytest.importorskip("transformers")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the first place where scratch files may go
    return load_seed()


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

    torch.manual_seed(7)
    with monkeypatch.context() as patch:
        patch.setattr(seed.GPTLMLoss, "forward", noting)
        with suppress(Enough):
            seed.train_cpu(fraction)
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


def test_losses_are_equal_with_and_without_offload(
    seed: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shrink(seed, monkeypatch)
    in_ram = losses_of(seed, monkeypatch, 0.0)
    printed = capsys.readouterr().out
    assert [f"[{i}] loss: {loss:.3f}" for i, loss in enumerate(in_ram)] == printed.split("\n")[1:4]
    assert len(in_ram) == len(set(in_ram)) == 3
    assert losses_of(seed, monkeypatch, 1.0) == in_ram
    assert losses_of(seed, monkeypatch, 0.5) == in_ram


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_document_as_it_stands(seed: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    in_ram = losses_of(seed, monkeypatch, 0.0, enough=3)
    assert len(in_ram) == 3
    assert all(10.5 < loss < 11.5 for loss in in_ram)  # the document saw 10.951 to 10.994
    assert losses_of(seed, monkeypatch, 1.0) == in_ram


if __name__ == "__main__":
    DIFF.write_text("\n".join(difference()) + "\n", encoding="utf-8")
    sys.stdout.write(f"{DIFF}\n")
