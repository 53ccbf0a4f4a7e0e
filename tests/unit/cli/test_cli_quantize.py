"""`tensorstow quantize`: a folder in, a folder out, and errors by name."""

import json
from pathlib import Path

import pytest
import torch

from tensorstow.cli.main import main
from unit.fsdp.test_experts import made

pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  # seconds

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"  # a folder, though models are called so


def test_it_says_what_it_has_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.with_name("out")
    assert main(["quantize", str(folder), str(out), "--nf4", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["path"] == str(out)
    assert said["matrices"] == 7
    assert said["nbytes"] < said["source_bytes"]
    assert main(["quantize", str(folder), str(folder.with_name("two")), "--int8"]) == 0
    assert "8 matrices in int8, " in capsys.readouterr().out


def test_experts_are_quantized_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "base"
    made("mixtral", torch.bfloat16).save_pretrained(source)
    assert main(["quantize", str(source), str(tmp_path / "linear"), "--int8"]) == 0
    said = capsys.readouterr().out
    assert "13 matrices in int8, " in said
    assert "72 matrices of experts stayed as they are: --experts includes them" in said
    assert main(["quantize", str(source), str(tmp_path / "all"), "--int8", "--experts"]) == 0
    said = capsys.readouterr().out
    assert "85 matrices in int8, " in said
    assert "stayed" not in said


def test_experts_that_are_no_matrices_are_not_passed_over(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.with_name("out")
    assert main(["quantize", str(folder), str(out), "--int8", "--experts"]) == 2
    assert "no matrix of an expert that LlamaForCausalLM stacks" in capsys.readouterr().err
    assert not out.exists()


def test_errors_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        ([str(folder), str(folder), "--int8"], "nothing is overwritten"),
        ([str(folder / "none"), "out", "--int8"], "no existing file or folder"),
        ([str(folder.parent), "out", "--int8"], "no configuration"),
    ):
        assert main(["quantize", *words]) == 2
        assert said in capsys.readouterr().err
    for words in ([], ["--int8", "--nf4"]):
        with pytest.raises(SystemExit):
            main(["quantize", str(folder), "out", *words])
