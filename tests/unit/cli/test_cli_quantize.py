"""`tensorstow quantize`: a folder in, a folder out, and errors by name."""

from pathlib import Path

import pytest
import torch

from command_line import CommandLine
from unit.fsdp.test_experts import made

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  # seconds

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"  # a folder, though models are called so


def test_it_says_what_it_has_written(folder: Path, cli: CommandLine) -> None:
    out = folder.with_name("out")
    said = cli.json("quantize", folder, out, "--nf4")
    assert said["path"] == str(out)
    assert said["matrices"] == 7
    assert said["nbytes"] < said["source_bytes"]
    assert "8 matrices in int8, " in cli("quantize", folder, folder.with_name("two"), "--int8")


def test_experts_are_quantized_on_request(tmp_path: Path, cli: CommandLine) -> None:
    source = tmp_path / "base"
    made("mixtral", torch.bfloat16).save_pretrained(source)
    said = cli("quantize", source, tmp_path / "linear", "--int8")
    assert "13 matrices in int8, " in said
    assert "72 matrices of experts stayed as they are: --experts includes them" in said
    said = cli("quantize", source, tmp_path / "all", "--int8", "--experts")
    assert "85 matrices in int8, " in said
    assert "stayed" not in said


def test_experts_that_are_no_matrices_are_not_passed_over(folder: Path, cli: CommandLine) -> None:
    out = folder.with_name("out")
    assert "no matrix of an expert that LlamaForCausalLM stacks" in cli(
        "quantize", folder, out, "--int8", "--experts", status=2
    )
    assert not out.exists()


def test_errors_are_named(folder: Path, cli: CommandLine) -> None:
    for words, said in (
        ([str(folder), str(folder), "--int8"], "nothing is overwritten"),
        ([str(folder / "none"), "out", "--int8"], "no existing file or folder"),
        ([str(folder.parent), "out", "--int8"], "no configuration"),
    ):
        assert said in cli("quantize", *words, status=2)
    for words in ([], ["--int8", "--nf4"]):
        cli.exit("quantize", folder, "out", *words, status=2)
