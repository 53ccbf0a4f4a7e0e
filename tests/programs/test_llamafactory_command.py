"""The guide's command of LLaMA-Factory, as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import trainers
from tree import ROOT

WORDS = [
    *("<|im_start|>user", "<|im_start|>assistant", "<|im_end|>"),
    *("a", "b", "a<|im_end|>", "b<|im_end|>", "?"),
]


def make_inputs(place: Path) -> Path:
    """Write a tiny model with its tokenizer, conversations, and the YAML of a run of two steps."""
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415  # seconds
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    words, unknown = {word: i for i, word in enumerate(WORDS)}, {"unk_token": "?", "pad_token": "?"}
    tokenizer = Tokenizer(models.WordLevel(words, unknown["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **unknown)
    made.save_pretrained(place / "model")
    model = trainers.model()
    model.config.tie_word_embeddings = False  # LLaMA-Factory resumes no tied weights
    type(model)(model.config).save_pretrained(place / "model")
    lines = []
    for i in range(8):
        said = {"user": "a b", "assistant": "b a" if i % 2 else "a a b"}
        content = [(who, [{"type": "text", "value": text}]) for who, text in said.items()]
        lines.append({"messages": [{"role": who, "content": text} for who, text in content]})
    (place / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sizes = {"micro_batch_size": 2, "global_batch_size": 4, "cutoff_len": 16, "max_steps": 2}
    off = {"bf16": False, "enable_activation_checkpointing": False, "batching_workers": 0}
    paths = {"model": "model", "train_dataset": "rows.jsonl", "output_dir": "out"}
    run = {key: str(place / name) for key, name in paths.items()} | sizes | off
    run |= trainers.yaml_of_guide("LLaMA-Factory", place)
    (place / "run.yaml").write_text(yaml.safe_dump({**run, "save_steps": 2}))
    return place / "run.yaml"


def start(file: Path, *options: str) -> subprocess.Popen[str]:
    """Start the guide's command with another file, and options that it adds."""
    guide = (ROOT / "docs/guides/trainers.md").read_text(encoding="utf-8")
    line = next(
        line for line in guide.splitlines() if line.startswith("    python -m tensorstow.int")
    )
    python, *words, name = line.split()
    assert (python, name) == ("python", file.name)
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(file.parent / "cache")}
    return subprocess.Popen(
        [sys.executable, *words, str(file), *options],
        env={**os.environ, **offline},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def output_of(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return output


def test_the_command_of_the_guide_trains_and_resumes(tmp_path: Path) -> None:
    """To the weights that torch's AdamW has after three steps, and without a warning of ours."""
    pytest.importorskip("llamafactory", reason="set-up could not install it")
    file = make_inputs(tmp_path)
    of_torch = ("optim_config=null", "max_steps=3", f"output_dir={tmp_path / 'torch'}")
    plain, ours = start(file, *of_torch), start(file)
    output_of(plain)
    outputs = output_of(ours) + output_of(start(file, "max_steps=3", "resume_from_checkpoint=auto"))
    assert "Resumed from checkpoint: step=2" in outputs
    assert "not committed" not in outputs
    reference = torch.load(tmp_path / "out/checkpoint-2/optimizer/state_dict.pt")
    assert (reference["tensorstow"]["step"], reference["state"]) == (2, {})
    first, found, expected = (
        load_file(tmp_path / name / "model.safetensors") for name in ("model", "out", "torch")
    )
    assert not torch.allclose(found["lm_head.weight"], first["lm_head.weight"], atol=1e-5)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)
