"""A folder in codes: what is in it, who reads it, and what is refused before it has its name."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tensorstow
from tensorstow import Plan
from tensorstow.base.errors import DamageError, OptionError, StoreFormatError, TransferError
from tensorstow.checkpoint.pretrained import PretrainedFiles
from tensorstow.checkpoint.quantized_folder import quantize_folder
from tensorstow.checkpoint.weight_encoders import ENCODERS
from tensorstow.io.mapped import PieceFile

pytest.importorskip("transformers")
KINDS = ["int8", "nf4"]
TOKENS = torch.arange(16).view(2, 8)


def config_of(**changes: Any) -> Any:  # noqa: ANN401  # transformers'
    from transformers import LlamaConfig  # noqa: PLC0415  # seconds

    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "use_cache": False}
    return LlamaConfig(**{"vocab_size": 96, **sizes, **heads, **changes})


def on_meta(config: Any) -> Any:  # noqa: ANN401
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def saved(folder: Path, shard: str = "60KB", **changes: Any) -> Any:  # noqa: ANN401
    """Save a model, a tokenizer's file, and what is no part of a checkpoint; return the model."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(**changes), dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / "pytorch_model.bin").write_bytes(b"other weights")
    (folder / "runs").mkdir()
    return model


def quantize(tmp_path: Path, kind: str, **changes: Any) -> Path:  # noqa: ANN401
    config = config_of(**changes)
    return quantize_folder(
        tmp_path / "model", tmp_path / "out", on_meta(config), ENCODERS[kind]
    ).path


def values_of(folder: Path, model: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    files = PretrainedFiles(folder, model)
    return {n: files.reader([n], p)(0, p.shape[0]).clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("shard", ["60KB", "10GB"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_the_shards_and_files_of_the_old_one(
    tmp_path: Path, kind: str, shard: str
) -> None:
    model = saved(tmp_path / "model", shard)
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").glob("*.*")}
    out = quantize(tmp_path, kind)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "model").glob("*.*")}
    names = {path.name for path in out.iterdir()}
    left_out = {"pytorch_model.bin"}
    assert names - before.keys() == {n for n in names if n.endswith(".digests")} != set()
    assert before.keys() - names == left_out
    if shard == "60KB":
        index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
        stored = {path.name: load_file(path) for path in out.glob("*.safetensors")}
        assert len(stored) > 2
        assert {n: f for f, tensors in stored.items() for n in tensors} == index["weight_map"]
        nbytes = sum(t.nbytes for tensors in stored.values() for t in tensors.values())
        assert index["metadata"]["total_size"] == nbytes
    PretrainedFiles(out, model).verify()
    coded = set(PretrainedFiles(out).coded)
    linear = {n for n, p in model.named_parameters() if "proj" in n and p.ndim == 2}
    assert coded == linear | ({"lm_head.weight"} if kind == "int8" else set())
    for name, values in values_of(out, model).items():
        weight = model.get_parameter(name)
        if name in coded:
            bound = 0.003 if kind == "int8" else 0.03
            assert 0 < (values - weight).abs().max() < bound
        else:
            assert torch.equal(values, weight)
    assert list(tmp_path.glob(".*")) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_generates_and_trains_from_it(tmp_path: Path, kind: str) -> None:
    saved(tmp_path / "model")
    out = quantize(tmp_path, kind)
    wanted = saved(tmp_path / "other")
    with torch.no_grad():
        for name, values in values_of(out, wanted).items():
            wanted.get_parameter(name).copy_(values)
    wanted.requires_grad_(requires_grad=False)
    read, _ = tensorstow.stow(on_meta(config_of()), None, plan=Plan(parameters="disk"), weights=out)
    assert torch.equal(read(TOKENS).logits, wanted(TOKENS).logits)


def test_bitsandbytes_and_transformers_read_it(tmp_path: Path) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    model = saved(tmp_path / "model")
    out = quantize(tmp_path, "nf4")
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    ours = values_of(out, model)
    assert sum(isinstance(m, bnb.nn.Linear4bit) for m in theirs.modules()) == 14
    for name, parameter in theirs.named_parameters():
        values = parameter.detach()
        if isinstance(parameter, bnb.nn.Params4bit):
            values = bnb.functional.dequantize_4bit(values, parameter.quant_state)
        assert torch.equal(values, ours[name]), name


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_what_they_write_is_read(tmp_path: Path, kind: str, double: bool) -> None:  # noqa: FBT001
    bnb = pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig  # noqa: PLC0415

    model = saved(tmp_path / "model")
    options = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double
    )
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.bfloat16, quantization_config=options
    )
    theirs.save_pretrained(tmp_path / "theirs")
    ours = values_of(tmp_path / "theirs", model)
    files = PretrainedFiles(tmp_path / "theirs", model)
    assert files.unused([name for name, _ in model.named_parameters()]) == []
    for name, parameter in theirs.named_parameters():
        values = parameter.detach()
        if isinstance(parameter, bnb.nn.Params4bit):
            values = bnb.functional.dequantize_4bit(values, parameter.quant_state)
        assert torch.equal(values, ours[name]), name
    if kind == "nf4" and double:
        mine, other = load_all(quantize(tmp_path, "nf4")), load_all(tmp_path / "theirs")
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            assert tensor.dtype == other[name].dtype
            if name.endswith("absmax"):  # see test_weight_codes: a few are a step off
                assert (tensor.float() - other[name].float()).abs().max() <= 1
            elif "quant_state" not in name:
                assert torch.equal(tensor, other[name]), name


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()}


def test_compressed_tensors_and_transformers_read_it(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    wanted = saved(tmp_path / "model")
    out = quantize(tmp_path, "int8")
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, values in values_of(out, wanted).items():
            wanted.get_parameter(name).copy_(values)
        ours, logits = wanted(TOKENS).logits.float(), theirs(TOKENS).logits.float()
    assert (ours - logits).abs().max() < 0.05 * ours.abs().max()  # theirs rounds scales to bf16


# --- what is refused ---


def test_what_cannot_be_quantized_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    model, out = tmp_path / "model", tmp_path / "out"
    made = quantize(tmp_path, "nf4")
    encoder = ENCODERS["int8"]
    with pytest.raises(OptionError, match="is already, by bitsandbytes"):
        quantize_folder(made, tmp_path / "new", on_meta(config_of()), encoder)
    with pytest.raises(OptionError, match="exists: nothing is overwritten"):
        quantize_folder(model, out, on_meta(config_of()), encoder)
    with pytest.raises(OptionError, match=r"config\.json cannot be read"):
        quantize_folder(tmp_path, tmp_path / "new", on_meta(config_of()), encoder)
    os.remove(made / "config.json")  # noqa: PTH107
    (made / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(OptionError, match="is already: take the original"):
        quantize_folder(made, tmp_path / "new", on_meta(config_of()), encoder)
    (made / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(OptionError, match="no JSON object"):
        quantize_folder(made, tmp_path / "new", on_meta(config_of()), encoder)
    more = on_meta(config_of(num_hidden_layers=3))
    with pytest.raises(StoreFormatError, match=r"no tensor 'model\.layers\.2"):
        quantize_folder(model, tmp_path / "new", more, encoder)
    wide = on_meta(config_of(vocab_size=97))
    with pytest.raises(StoreFormatError, match=r"embed_tokens.*\(96, 128\)"):
        quantize_folder(model, tmp_path / "new", wide, encoder)
    assert not (tmp_path / "new").exists()


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, GPT2Config  # noqa: PLC0415

    config = GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=16, vocab_size=32)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(OptionError, match="has no linear layer"):
        quantize_folder(tmp_path / "gpt2", tmp_path / "out", on_meta(config), ENCODERS["int8"])


def test_files_that_were_cut_short_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    path = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises((OptionError, StoreFormatError), match=f"{path.name}.*cut short"):
        quantize(tmp_path, "int8")
    path.unlink()
    with pytest.raises(StoreFormatError, match=path.name):
        quantize(tmp_path, "int8")
    assert not (tmp_path / "out").exists()


def test_a_source_with_other_digests_is_damaged(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    quantize(tmp_path, "int8").rename(tmp_path / "int8")
    path = min((tmp_path / "int8").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamageError, match=path.name):
        PretrainedFiles(tmp_path / "int8").verify()


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_leaves_nothing(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "model")
    (tmp_path / "out").mkdir()  # an empty one is taken
    file = sorted((tmp_path / "model").glob("*.safetensors"))[1]
    tensors = load_file(file)
    name = next(n for n in tensors if "proj" in n)
    save_file({**tensors, name: tensors[name] * torch.nan}, file, {"format": "pt"})
    with pytest.raises(StoreFormatError, match="not finite"):
        quantize(tmp_path, kind)
    save_file(tensors, file, {"format": "pt"})
    write, count = PieceFile.write, [0]

    def failing(file: PieceFile, values: torch.Tensor, offset: int) -> None:
        count[0] += 1
        if count[0] == 9:
            raise TransferError(file.path, "write", offset=offset, length=1, errno=28)
        write(file, values, offset)

    monkeypatch.setattr(PieceFile, "write", failing)
    with pytest.raises(TransferError):
        quantize(tmp_path, kind)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}
    assert list((tmp_path / "out").iterdir()) == []
    quantize(tmp_path, kind)
    assert (tmp_path / "out" / "config.json").exists()


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    saved(tmp_path / "model")
    old, new = tmp_path / f".out.{'0' * 16}", tmp_path / f".out.{'1' * 16}"
    for folder in (old, new):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"")
    os.utime(old, (0, 0))
    quantize(tmp_path, "int8")
    assert (old.exists(), new.exists()) == (False, True)
