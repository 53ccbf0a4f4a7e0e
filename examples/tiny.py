"""A small Llama, its tokenizer and some texts: what the examples train with ``--tiny``."""

import json
import os
import random
import tempfile
from contextlib import suppress
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = 500


def make_tiny(folder: Path) -> tuple[str, str]:
    """Write model, tokenizer and texts into ``folder``, unless it exists.

    Returns:
        What an example takes as ``--model`` and ``--data``.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        _model().save_pretrained(made / "model")
        _tokenizer().save_pretrained(made / "model")
        lines = [json.dumps({"text": text}) for text in _texts()]
        (made / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
        with suppress(OSError):  # another rank, or another run, was first
            os.rename(made, folder)  # noqa: PTH104  # replaces no folder that holds files
    return str(folder / "model"), str(folder / "texts.jsonl")


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    config = LlamaConfig(vocab_size=WORDS, num_attention_heads=4, **sizes)
    model: LlamaForCausalLM = LlamaForCausalLM(config).to(torch.bfloat16)
    return model


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{number}": number for number in range(WORDS)}
    made = Tokenizer(WordLevel(words, unk_token="w1"))  # noqa: S106  # a word
    made.pre_tokenizer = WhitespaceSplit()
    names = {"eos_token": "w0", "pad_token": "w0", "unk_token": "w1"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names)


def _texts() -> list[str]:
    """Return texts that count, so that a falling loss is a model that learns."""
    drawn = random.Random(0)  # noqa: S311  # no secret
    starts = [drawn.randrange(2, WORDS - 40) for _ in range(64)]
    return [" ".join(f"w{word}" for word in range(start, start + 40)) for start in starts]
