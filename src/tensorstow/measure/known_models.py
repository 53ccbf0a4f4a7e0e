"""Models by name: configurations as transformers reads them."""

from collections.abc import Mapping
from typing import Any

_GPT2 = {"model_type": "gpt2"}
_LLAMA: dict[str, Any] = {"model_type": "llama", "dtype": "bfloat16"}
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "gpt2": _GPT2,
    "gpt2-medium": {**_GPT2, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {**_GPT2, "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {**_GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt-3": {**_GPT2, "n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048},
    "llama-3.2-1b": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "llama-2-7b": {**_LLAMA},
    "llama-3-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "llama-2-13b": {
        **_LLAMA,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "llama-2-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    "llama-3-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
"""Configurations as transformers reads them, by the names that people use."""
