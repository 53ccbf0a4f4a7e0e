"""Generation by a model of Llama's shape that is four times as large as the memory for weights.

The first run writes a model with random weights to a folder; its weights are then read from there,
once per token of a batch. The tokens are compared with those of the model in memory.

    python examples/generation.py
    python examples/generation.py --layers 32 --hidden-size 4096 --folder /nvme/model --no-compare
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tensorstow
from tensorstow import Budget
from tensorstow.base.sizes import format_bytes


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--folder", type=Path, help="of the model; default: a temporary one")
    parser.add_argument("--no-compare", action="store_true", help="do not make it in memory")
    return parser.parse_args(arguments)


def make(options: argparse.Namespace) -> LlamaForCausalLM:
    """Return the model; weights are bfloat16, rotary frequencies stay fp32 (not so by ``to``)."""
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden_size,
        intermediate_size=options.hidden_size * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden_size // 64),
        num_key_value_heads=1,
        pad_token_id=0,
        eos_token_id=None,
    )
    model: LlamaForCausalLM = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model


def generate(options: argparse.Namespace, folder: Path) -> torch.Tensor:
    """Generate with the weights in ``folder``, a quarter of them in memory; return the tokens."""
    with torch.device("meta"):
        model = make(options).eval()
    nbytes = sum(p.nbytes for p in model.parameters())
    budget = Budget(host=nbytes // 4)
    model, _ = tensorstow.stow(model, None, weights=folder, budget=budget)
    stay = len(tensorstow.plan_of(model).parameter_units)
    print(f"{format_bytes(nbytes)} of weights, {format_bytes(nbytes // 4)} of memory for them:")
    print(f"{stay} units stay there, the others are read once per token")
    prompt = torch.arange(options.batch * 4).view(options.batch, 4) % options.vocabulary
    start = time.perf_counter()
    tokens: torch.Tensor = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=options.tokens
    )
    rate = options.batch * options.tokens / (time.perf_counter() - start)
    print(f"{rate:.1f} tokens per second, {options.batch} sequences at a time")
    return tokens


def main(options: argparse.Namespace) -> torch.Tensor:
    """Write a model if there is none, generate, and compare."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        folder = options.folder or Path(scratch)
        if not any(folder.glob("*.safetensors")):
            torch.manual_seed(0)
            make(options).save_pretrained(folder)
        tokens = generate(options, folder)
        if not options.no_compare:
            whole = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
            prompt = tokens[:, :4]
            expected = whole.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=options.tokens
            )
            print("the tokens of the model in memory:", bool(torch.equal(tokens, expected)))
            if not torch.equal(tokens, expected):
                raise SystemExit(1)
    return tokens


if __name__ == "__main__":
    main(parse())
