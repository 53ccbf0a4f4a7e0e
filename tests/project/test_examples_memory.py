"""The examples of long sequences and of large vocabularies, at small sizes."""

import argparse
import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

import tensorstow
from tree import ROOT


def _example(name: str) -> ModuleType:
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _in_memory(example: ModuleType, args: argparse.Namespace) -> list[float]:
    model, tokens, losses = example.make(args), example.batch(args), []
    with tensorstow.AdamW(model.parameters(), lr=1e-3) as optimizer:
        for _ in range(args.steps):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_long_sequences_have_their_activations_on_disk(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    example = _example("long_sequence")
    small = ["--sequence=512", "--layers=3", "--width=32", "--heads=2", "--vocabulary=100"]
    more = ["--steps=2", "--ram-budget=1MiB", f"--dir={tmp_path}"]
    args = example.parse([*small, *more])
    losses = example.train(args)
    assert losses == _in_memory(example, args)  # to the last bit
    lines = capsys.readouterr().out.splitlines()
    assert "at most 1.0 MiB of host memory" in lines[-1]
    assert " 0 B written" not in lines[-1]
    assert not list((tmp_path / "activations").iterdir())


def test_a_large_vocabulary_has_no_logits(capsys: pytest.CaptureFixture[str]) -> None:
    example = _example("large_vocabulary")
    small = ["--vocabulary=1000", "--tokens=64", "--width=16", "--layers=1"]
    losses = example.train(example.parse(small))
    assert losses[0] == pytest.approx(math.log(1000), rel=0.1)
    assert losses[-1] < losses[0]
    assert "the logits would be 250.0 KiB" in capsys.readouterr().out
