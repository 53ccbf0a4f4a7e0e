"""ColossalAI's offload document: its Gemini example runs with only the import lines changed.

As `test_seed_train_cpu.py` has it: `seeds/train_gemini_cpu_scraped.txt` is what the page had left,
`seeds/train_gemini_cpu.py` the example restored, `seeds/train_gemini_cpu.diff` the difference. The
page's `_*`, which is no Python, is `*_`. What it passes to GeminiPlugin is as upstream's repository
has it. Where there is no CUDA, `torch.cuda.current_device()` of the example is answered with "cpu".

Write the difference anew with `python tests/programs/test_seed_train_gemini_cpu.py`.
"""

import logging
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from seed_pages import SEEDS, changes, difference, load, losses_of, shrink

NAME = "train_gemini_cpu"
DIFF = SEEDS / f"{NAME}.diff"

LOST_LINES = {
    "super().__init__()",
    "shift_labels.view(-1))",
    "device=device)",
    "strict_ddp_mode=True,",
    "device=torch.cuda.current_device(),",
    "placement_policy='cpu',",
    "pin_memory=True,",
    "hidden_dim=config.n_embd,",
    "initial_scale=2**5)",
    "optimizer.step()",
    "optimizer.zero_grad()",
}
MISPRINT = "model, optimizer, criterion, _* = booster.boost(model, optimizer, criterion)"
IMPORTS = {
    "import tensorstow.colossalai as colossalai",
    "from tensorstow.colossalai.nn.optimizer import HybridAdam",
    "from tensorstow.colossalai.utils.model.colo_init_context import ColoInitContext",
    "from tensorstow.colossalai.booster import Booster",
    "from tensorstow.colossalai.booster.plugin import GeminiPlugin",
}


def test_the_difference_shown_is_the_difference() -> None:
    assert DIFF.read_text(encoding="utf-8").splitlines() == difference(NAME)


def test_only_import_lines_are_changed_and_only_lost_lines_added() -> None:
    removed, added = changes(NAME)
    rest = [line for line in removed if line != MISPRINT]
    assert len(rest) == len(removed) - 1 == len(IMPORTS)
    assert all("colossalai" in line and "import" in line for line in rest)
    assert set(added) == LOST_LINES | IMPORTS | {MISPRINT.replace("_*", "*_")}


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[ModuleType, ModuleType]:
    pytest.importorskip("transformers")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # the first place where scratch files may go
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    return load("train_cpu"), load(NAME)


def choose(seed: ModuleType, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the example ask for another policy."""
    plugin = seed.GeminiPlugin

    def chosen(**given: object) -> object:
        return plugin(**{**given, "placement_policy": policy})

    monkeypatch.setattr(seed, "GeminiPlugin", chosen)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the example computes in fp16")
@pytest.mark.parametrize("policy", ["cpu", "auto", "const"])
def test_losses_are_those_of_the_cpu_example(
    seeds: tuple[ModuleType, ModuleType], policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in seeds:
        shrink(seed, monkeypatch)
    plain, gemini = seeds
    choose(gemini, policy, monkeypatch)
    without = losses_of(plain, monkeypatch, 0.0)
    assert len(without) == len(set(without)) == 3
    assert losses_of(gemini, monkeypatch, 0.0) == without
    assert losses_of(gemini, monkeypatch, 1.0) == without


def test_what_the_search_reports_is_of_what_is_placed(
    seeds: tuple[ModuleType, ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, gemini = seeds
    shrink(gemini, monkeypatch)
    model = gemini.GPT2LMHeadModel(gemini.GPT2Config())
    nbytes = 4 * gemini.get_model_numel(model)
    with caplog.at_level(logging.INFO, logger="tensorstow"):
        losses_of(gemini, monkeypatch, 0.0, enough=1)
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("placing ")]
    assert f"used {nbytes / 2**20:.2f} MiB, wasted 0.00 MiB (0.00%)" in line
    told = [r.getMessage() for r in caplog.records if "changes nothing" in r.getMessage()]
    assert any("hidden_dim=64" in each for each in told)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there the example computes in fp16")
def test_the_documents_as_they_stand(
    seeds: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, gemini = seeds
    in_ram = losses_of(plain, monkeypatch, 0.0, enough=2)
    assert len(set(in_ram)) == 2
    assert all(10.5 < loss < 11.5 for loss in in_ram)  # the document saw 10.951 to 10.994
    assert losses_of(plain, monkeypatch, 1.0, enough=2) == in_ram
    assert losses_of(gemini, monkeypatch, 1.0, enough=2) == in_ram


if __name__ == "__main__":
    DIFF.write_text("\n".join(difference(NAME)) + "\n", encoding="utf-8")
    sys.stdout.write(f"{DIFF}\n")
