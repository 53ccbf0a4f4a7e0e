"""transformers' ``generate`` with weights on disk: tokens and logits of the model in memory."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstow
from tensorstow import Plan
from tensorstow.fsdp.read_only import stream_of

WORDS, NEW = 96, 6
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def config_of(kind: str) -> Any:  # noqa: ANN401  # another library's
    """Return a tiny configuration."""
    from transformers import GPT2Config, LlamaConfig  # noqa: PLC0415  # takes seconds

    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0, "vocab_size": WORDS}
    if kind == "gpt2":
        return GPT2Config(n_layer=3, n_head=2, n_embd=32, n_positions=64, **ends)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    return LlamaConfig(tie_word_embeddings=kind == "tied", **sizes, **HEADS, **ends)


@pytest.mark.parametrize(
    ("kind", "dtype", "shard"),
    [
        ("llama", torch.float32, "1GB"),
        ("llama", torch.bfloat16, "20KB"),
        ("tied", torch.bfloat16, "1GB"),
        ("gpt2", torch.float32, "40KB"),
    ],
)
def test_generation_from_disk_is_that_of_the_model_in_memory(
    tmp_path: Path, kind: str, dtype: torch.dtype, shard: str
) -> None:
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(config_of(kind), dtype=dtype).eval()
    whole.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard != "1GB")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(kind), dtype=dtype).eval()
    model, _ = tensorstow.stow(model, None, plan=Plan(parameters="disk"), weights=tmp_path)
    tokens = torch.randint(1, WORDS, (3, 7))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, whole(tokens).logits)
    stream = stream_of(model)
    assert stream is not None
    before = stream.bytes_read
    told, expected = (
        each.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=NEW,
            return_dict_in_generate=True,
        )
        for each in (model, whole)
    )
    layers = told.past_key_values.layers
    width = 32 if kind == "gpt2" else 16  # of two of four heads
    assert sum(t.nbytes for layer in layers for t in (layer.keys, layer.values)) == (
        2 * 3 * 3 * (7 + NEW - 1) * width * dtype.itemsize  # blocks, sequences, tokens
    )
    assert stream.host.memory.peak <= stream.host.memory.capacity
    told, expected = told.sequences, expected.sequences
    assert torch.equal(told, expected)
    assert told.shape == (3, 7 + NEW)
    # The last pass has read ahead for the next one; a tied weight may be read at both ends.
    passes = NEW * sum(p.nbytes for p in whole.parameters())
    tied = 0 if kind == "llama" else max(t.entry.nbytes for t in stream.calls[0].unit.tensors)
    assert passes // 2 <= stream.bytes_read - before <= passes + NEW * tied
