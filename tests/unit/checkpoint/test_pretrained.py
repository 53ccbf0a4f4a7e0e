"""What transformers writes is loaded into its models, and what is written here it loads."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tensorstow
from tensorstow import Plan
from tensorstow.base.errors import StoreFormatError
from tensorstow.checkpoint.pretrained import (
    PretrainedFiles,
    _pieces_of,
    is_of_transformers,
    origins_of,
)

transformers = pytest.importorskip("transformers")

DECODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
SMALL_T5 = {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 32}
BART = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 32,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("GPT2Config", {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32}),
    "LlamaForCausalLM": ("LlamaConfig", {**DECODER, "tie_word_embeddings": True}),
    "MistralForCausalLM": ("MistralConfig", DECODER),
    "Qwen2ForCausalLM": ("Qwen2Config", DECODER),
    "GemmaForCausalLM": ("GemmaConfig", {**DECODER, "head_dim": 8}),
    "Phi3ForCausalLM": ("Phi3Config", DECODER),
    "MixtralForCausalLM": ("MixtralConfig", {**DECODER, "num_local_experts": 3}),
    "Qwen2MoeForCausalLM": (
        "Qwen2MoeConfig",
        {**DECODER, **EXPERTS, "shared_expert_intermediate_size": 8},
    ),
    "Qwen3MoeForCausalLM": ("Qwen3MoeConfig", {**DECODER, **EXPERTS, "head_dim": 8}),
    "OlmoeForCausalLM": ("OlmoeConfig", {**DECODER, "num_experts": 3, "num_experts_per_tok": 2}),
    "BertForMaskedLM": ("BertConfig", {**ENCODER, "vocab_size": 32}),
    "RobertaForMaskedLM": ("RobertaConfig", {**ENCODER, "vocab_size": 32}),
    "DistilBertForMaskedLM": (
        "DistilBertConfig",
        {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2, "vocab_size": 32},
    ),
    "T5ForConditionalGeneration": ("T5Config", SMALL_T5),
    "BartForConditionalGeneration": ("BartConfig", BART),
    "ViTForImageClassification": ("ViTConfig", {**ENCODER, "image_size": 8, "patch_size": 4}),
    "ViTModel": ("ViTConfig", {**ENCODER, "image_size": 8, "patch_size": 4}),
    "Dinov2Model": ("Dinov2Config", {**ENCODER, "image_size": 8, "patch_size": 4}),
    "CLIPVisionModel": ("CLIPVisionConfig", {**ENCODER, "image_size": 8, "patch_size": 4}),
    "SiglipVisionModel": ("SiglipVisionConfig", {**ENCODER, "image_size": 8, "patch_size": 4}),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {**ENCODER, "vocab_size": 32}),
    "FalconForCausalLM": ("FalconConfig", {**DECODER, "num_kv_heads": 1}),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {
            **DECODER,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "q_lora_rank": 8,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 4,
            "first_k_dense_replace": 1,
        },
    ),
    "WhisperForConditionalGeneration": ("WhisperConfig", {**BART, "pad_token_id": 0}),
}


def made(family: str, seed: int) -> Any:  # noqa: ANN401  # another library's
    config, sizes = FAMILIES[family]
    torch.manual_seed(seed)
    return getattr(transformers, family)(getattr(transformers, config)(**sizes))


def stowed(model: nn.Module, **given: Any) -> tuple[nn.Module, tensorstow.AdamW]:  # noqa: ANN401
    plan = Plan(parameters="disk", states="disk")
    return tensorstow.stow(model, partial(tensorstow.AdamW, lr=1e-2), plan=plan, **given)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_goes_both_ways(tmp_path: Path, family: str) -> None:
    wanted = made(family, 0)
    wanted.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    right = wanted.state_dict()
    model, optimizer = stowed(made(family, 1), weights=tmp_path / "theirs")
    got = model.state_dict()
    assert got.keys() == right.keys()
    assert all(torch.equal(got[name], right[name]) for name in right)
    tensorstow.save_safetensors(model, tmp_path / "ours", max_shard_bytes=20_000)
    model.save_pretrained(tmp_path / "by_state_dict")
    optimizer.close()
    for folder in ("ours", "by_state_dict"):
        back, told = getattr(transformers, family).from_pretrained(
            tmp_path / folder, output_loading_info=True
        )
        assert not any(told.values()), told
        assert back.config.architectures == [family]
        assert back.can_generate() == (tmp_path / folder / "generation_config.json").is_file()
        assert all(torch.equal(back.state_dict()[name], right[name]) for name in right)


@pytest.mark.parametrize("plan", [Plan(), Plan(parameters="disk", states="disk")], ids=str)
def test_a_model_on_the_meta_device_is_made_of_merged_tensors(tmp_path: Path, plan: Plan) -> None:
    wanted = made("MixtralForCausalLM", 0)
    wanted.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = made("MixtralForCausalLM", 0)
    make = partial(tensorstow.AdamW, lr=1e-2)
    model, optimizer = tensorstow.stow(
        model, make, plan=plan, weights=tmp_path, init=model._init_weights
    )
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, wanted(input_ids=tokens).logits)
    optimizer.close()


def test_a_part_takes_the_whole_s_checkpoint(tmp_path: Path) -> None:
    wanted = made("GPT2LMHeadModel", 0)
    wanted.save_pretrained(tmp_path)
    torch.manual_seed(1)
    model, optimizer = stowed(transformers.GPT2Model(wanted.config), weights=tmp_path)
    right = wanted.transformer.state_dict()
    assert all(torch.equal(value, right[name]) for name, value in model.state_dict().items())
    optimizer.close()


def test_another_model_s_checkpoint_is_refused(tmp_path: Path) -> None:
    made("LlamaForCausalLM", 0).save_pretrained(tmp_path)
    with pytest.raises(StoreFormatError, match=r"no tensor 'model\.layers.*of another model"):
        stowed(made("MixtralForCausalLM", 0), weights=tmp_path)


def test_a_tensor_is_made_when_it_is_read_of_its_own_sources() -> None:
    model = made("MixtralForCausalLM", 0)
    source = "model.layers.{}.block_sparse_moe.experts.{}.w{}.weight"
    shapes = {source.format(n, e, w): (24, 16) for n in range(2) for e in range(3) for w in (1, 3)}
    origins = origins_of(model, shapes)
    read: list[str] = []

    def reading(name: str) -> torch.Tensor:
        read.append(name)
        return torch.ones(24, 16)

    origin = origins["model.layers.1.mlp.experts.gate_up_proj"]
    assert not read
    assert origin.shape == tuple(model.model.layers[1].mlp.experts.gate_up_proj.shape)
    assert origin.make is not None
    assert origin.make(reading).shape == origin.shape
    assert sorted(read) == sorted(origin.sources) == sorted(n for n in shapes if "layers.1" in n)


def test_other_models_have_what_their_files_have() -> None:
    model = nn.Linear(2, 2)
    assert not is_of_transformers(model)
    (origin,) = origins_of(model, {"weight": (2, 2)}).values()
    assert origin == next(iter(origins_of(None, {"weight": [2, 2]}).values()))
    assert origin.make is None


def values(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def test_slices_are_read_in_the_dtype_that_is_asked(tmp_path: Path) -> None:
    save_file({"w": values(5, 3), "scale": torch.tensor(2.5)}, tmp_path / "one.safetensors")
    files = PretrainedFiles(tmp_path / "one.safetensors")
    assert (files.has("w"), files.has("v")) == (True, False)
    read = files.reader(["w"], torch.empty(5, 3, dtype=torch.bfloat16, device="meta"))
    assert read(1, 3).dtype == torch.bfloat16
    assert read(1, 3).tolist() == values(5, 3)[1:3].tolist()
    assert read(5, 5).shape == (0, 3)
    assert files.reader(["scale"], torch.empty(()))(0, 0).item() == 2.5


def test_dtypes_that_only_other_programs_write_are_read(tmp_path: Path) -> None:
    stored = {
        "a": torch.randn(4, 8).to(torch.float8_e4m3fn),
        "b": torch.arange(5).to(torch.uint16),
        "c": torch.randn(3, dtype=torch.complex64),
    }
    save_file(stored, tmp_path / "a.safetensors")
    files = PretrainedFiles(tmp_path)
    for name, dtype in (("a", torch.bfloat16), ("b", torch.int64), ("c", torch.complex64)):
        wanted = stored[name].to(dtype)
        assert torch.equal(files.reader([name], torch.empty_like(wanted))(1, 3), wanted[1:3])


def test_the_first_known_name_of_a_tied_parameter_is_taken(tmp_path: Path) -> None:
    save_file({"head.weight": values(2, 2)}, tmp_path / "model.safetensors")
    read = PretrainedFiles(tmp_path).reader(["embedding.weight", "head.weight"], torch.empty(2, 2))
    assert torch.equal(read(0, 2), values(2, 2))


def test_an_index_says_which_files_count(tmp_path: Path) -> None:
    save_file({"a": values(1)}, tmp_path / "first.safetensors")
    save_file({"b": values(2)}, tmp_path / "second.safetensors")
    save_file({"a": values(3), "old": values(3)}, tmp_path / "left_over.safetensors")
    assert PretrainedFiles(tmp_path).has("old")  # without an index all of a directory do
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = PretrainedFiles(tmp_path)
    assert [files.has(name) for name in ("a", "b", "old")] == [True, True, False]
    assert files.reader(["a"], torch.empty(1))(0, 1).tolist() == [0.0]


def test_what_is_not_there_is_told_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match="neither a safetensors file nor a directory"):
        PretrainedFiles(tmp_path)
    save_file({"layer.weight": values(2, 2)}, tmp_path / "model.safetensors")
    files = PretrainedFiles(tmp_path)
    with pytest.raises(StoreFormatError, match=r"no tensor 'layers\.weight'.*'layer\.weight'"):
        files.reader(["layers.weight"], torch.empty(2, 2))
    with pytest.raises(StoreFormatError, match="no tensor 'x', nor any like it"):
        files.reader(["x"], torch.empty(2, 2))
    with pytest.raises(StoreFormatError, match=r"is \(2, 2\) and the model's is \(2, 3\)"):
        files.reader(["layer.weight"], torch.empty(2, 3))


@pytest.mark.parametrize(
    ("join", "order"),
    [
        (lambda a, b: torch.cat([a, b]), ("a", "b")),
        (lambda a, b: torch.cat([b, a]), ("b", "a")),
        (lambda a, b: torch.stack([b, a]), ("b", "a")),
        (lambda a, b: torch.cat([a, b], dim=1), ()),  # row by row of both
        (lambda a, b: torch.cat([a, b]).T, ()),
    ],
)
def test_pieces_are_tensors_whose_bytes_follow_one_another(join: Any, order: Any) -> None:  # noqa: ANN401
    def convert(read: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
        return {"joined": join(read("a"), read("b"))}

    assert _pieces_of(("a", "b"), {"a": (3, 4), "b": (3, 4)}, convert) == order
