"""The examples of long sequences and of large vocabularies, at small sizes."""

import argparse
import importlib.util
import math
from pathlib import Path
from types import ModuleType

import pytest

import tensorstow
from largest_tensor import LargestTensor
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
    small = ["--sequence=2048", "--layers=3", "--width=32", "--heads=2", "--vocabulary=100"]
    more = ["--steps=2", "--ram-budget=4MiB", f"--dir={tmp_path}"]
    args = example.parse([*small, *more])
    losses = example.train(args)
    assert losses == _in_memory(example, args)  # to the last bit
    lines = capsys.readouterr().out.splitlines()
    assert "at most 4.0 MiB of host memory" in lines[-1]
    assert " 0 B written" not in lines[-1]
    assert not list((tmp_path / "activations").iterdir())


def test_a_large_vocabulary_has_no_logits(capsys: pytest.CaptureFixture[str]) -> None:
    example = _example("large_vocabulary")
    words, tokens = 100_000, 1024
    small = [f"--vocabulary={words}", f"--tokens={tokens}", "--width=16", "--layers=1"]
    with LargestTensor() as seen:
        losses = example.train(example.parse(small))
    assert seen.nbytes <= 256 << 20 < 4 * words * tokens
    assert losses[0] == pytest.approx(math.log(words), rel=0.1)
    assert losses[-1] < losses[0]
    assert "the logits would be 390.6 MiB" in capsys.readouterr().out
