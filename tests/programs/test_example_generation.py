"""The example of generation: a model of four times its memory says what it says in memory."""

import importlib.util
from pathlib import Path

import pytest

from tree import ROOT


def test_a_small_one_generates_the_tokens_of_the_model_in_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("generation", ROOT / "examples/generation.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    sizes = ["--layers=12", "--hidden-size=64", "--vocabulary=64", "--batch=2", "--tokens=3"]
    tokens = module.main(module.parse(sizes))
    assert tokens.shape == (2, 7)
    printed = capsys.readouterr().out
    assert "the tokens of the model in memory: True" in printed
    assert "0 units stay" not in printed
    assert list(tmp_path.iterdir()) == []
