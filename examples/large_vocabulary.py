"""A Llama with 131,072 words: the loss is computed in chunks, and logits are never whole.

    python examples/large_vocabulary.py
    python examples/large_vocabulary.py --vocabulary 1000 --width 16 --layers 1 --tokens 32

Of 4,096 tokens the logits alone have 2 GiB in fp32; torch's loss and its backward hold three
tensors of that size. In chunks they hold 256 MiB (`chunk_bytes=`).
"""

import argparse
from functools import partial

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tensorstow
from tensorstow.base.sizes import format_bytes
from tensorstow.losses import chunk_loss
from tensorstow.report.samples import MemorySampler


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; without arguments the vocabulary is that of Llama 3, rounded up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (
        ("vocabulary", 131072),
        ("tokens", 4096),
        ("width", 256),
        ("layers", 4),
        ("steps", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args(given)


def train(args: argparse.Namespace) -> list[float]:
    """Train on random tokens; return the loss of each step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    chunk_loss(model)  # the line that this example is about
    model, optimizer = tensorstow.stow(
        model, partial(tensorstow.AdamW, lr=1e-3), plan=tensorstow.Plan()
    )
    tokens = torch.randint(args.vocabulary, (1, args.tokens))
    losses = []
    with optimizer, MemorySampler({}) as memory:
        for step in range(1, args.steps + 1):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            print(f"step {step}: loss {losses[-1]:.3f}")
    resident = [sample.nbytes for sample in memory.held["process"].kept]
    print(
        f"training took {format_bytes(max(resident) - resident[0])} of resident memory at its peak;"
        f" the logits would be {format_bytes(4 * args.tokens * args.vocabulary)}"
    )
    return losses


if __name__ == "__main__":
    train(parse())
