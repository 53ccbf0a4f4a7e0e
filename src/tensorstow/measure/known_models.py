"""Models by name: configurations as transformers reads them."""

from collections.abc import Mapping
from typing import Any

_GPT2 = {"model_type": "gpt2"}
_LLAMA: dict[str, Any] = {"model_type": "llama", "dtype": "bfloat16"}
_LLAMA_3 = {"num_key_value_heads": 8, "vocab_size": 128256}


def _llama(width: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:  # noqa: ANN401
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {**_LLAMA, **sizes, "num_attention_heads": heads, **others}


KNOWN: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {**_GPT2, "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {**_GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt-3": {**_GPT2, "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048},
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, **_LLAMA_3, tie_word_embeddings=True),
    "llama-2-7b": _LLAMA,
    "llama-3-8b": _llama(4096, 14336, 32, 32, **_LLAMA_3),
    "llama-2-13b": _llama(5120, 13824, 40, 40),
    "llama-2-70b": _llama(8192, 28672, 80, 64, num_key_value_heads=8),
    "llama-3-70b": _llama(8192, 28672, 80, 64, **_LLAMA_3),
}
"""Configurations as transformers reads them, by the names that people use."""
