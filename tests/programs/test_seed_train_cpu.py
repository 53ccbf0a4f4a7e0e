"""ColossalAI's offload document: its CPU example runs with only the import lines changed.

The published page lost lines on the way here. `seeds/train_cpu_scraped.txt` quotes what was left,
`seeds/train_cpu.py` is the example restored, and `seeds/train_cpu.diff` is the difference between
the two: blank lines and indentation, which the page lost too, left aside. At its own size it runs
in `test_seed_train_gemini_cpu.py`, beside the page's other example.

Write the difference anew with `python tests/programs/test_seed_train_cpu.py`.
"""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from seed_pages import SEEDS, changes, difference, load, losses_of, shrink

NAME = "train_cpu"
DIFF = SEEDS / f"{NAME}.diff"

# What the page lost: nothing else may be added but imports and what quiets this house's linter.
LOST_LINES = {
    "super().__init__()",
    "shift_labels.view(-1))",
    "device=device)",
    "loss.backward()",
    "optimizer.step()",
    "optimizer.zero_grad()",
}


def test_the_difference_shown_is_the_difference() -> None:
    assert DIFF.read_text(encoding="utf-8").splitlines() == difference(NAME)


def test_only_import_lines_are_changed_and_only_lost_lines_added() -> None:
    removed, added = changes(NAME)
    assert removed
    assert all("colossalai" in line and "import" in line for line in removed)
    assert set(added) == LOST_LINES | {"from tensorstow.colossalai import HybridAdam"}


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    pytest.importorskip("transformers")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the first place where scratch files may go
    return load(NAME)


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


if __name__ == "__main__":
    DIFF.write_text("\n".join(difference(NAME)) + "\n", encoding="utf-8")
    sys.stdout.write(f"{DIFF}\n")
