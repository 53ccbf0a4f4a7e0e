"""GPT-2 on long sequences: what forward saves for backward goes to disk, as optimizer states do.

    python examples/long_sequence.py --sequence 8192 --dir /nvme/scratch
    python examples/long_sequence.py --sequence 64 --layers 2 --width 32 --steps 3

At 8,192 tokens GPT-2 saves more than 8 GiB a sequence; its weights take 0.5 GiB. With
--ram-budget 256MiB that much of it is in host memory, whatever the length.
"""

import argparse
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tensorstow
from tensorstow.base.sizes import format_bytes
from tensorstow.losses import chunk_loss


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; without arguments it is GPT-2 at 8,192 tokens."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("sequence", 8192), ("layers", 12), ("width", 768), ("heads", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("vocabulary", 50257), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ram-budget", default="256MiB", help="for saved activations")
    parser.add_argument("--dir", default="stow-long-sequence", help="for activations and states")
    return parser.parse_args(given)


def make(args: argparse.Namespace) -> GPT2LMHeadModel:
    """Make the model; without dropout, whose masks would be saved too."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_positions=args.sequence,
        n_layer=args.layers,
        n_embd=args.width,
        n_head=args.heads,
        vocab_size=args.vocabulary,
        bos_token_id=0,
        eos_token_id=0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )
    model = GPT2LMHeadModel(config)
    chunk_loss(model)  # logits of 8,192 tokens would hold 1.5 GiB, several times
    return model


def batch(args: argparse.Namespace) -> torch.Tensor:
    """Return one sequence of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(args.vocabulary, (1, args.sequence), generator=generator)


def train(args: argparse.Namespace) -> list[float]:
    """Train on random tokens; return the loss of each step."""
    model = make(args)
    plan = tensorstow.Plan(states="disk")
    model, optimizer = tensorstow.stow(
        model,
        lambda named, **where: tensorstow.AdamW(named, lr=1e-3, **where),
        plan=plan,
        dir=args.dir + "/states",
    )
    losses = []
    tokens = batch(args)
    with (
        optimizer,
        tensorstow.offload_activations(
            model, to="disk", ram_budget=args.ram_budget, dir=args.dir + "/activations"
        ),
    ):
        for step in range(1, args.steps + 1):
            start = time.perf_counter()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            moved = tensorstow.usage(model).activations
            print(
                f"step {step}: loss {losses[-1]:.3f}, {time.perf_counter() - start:.1f} s;"
                f" activations: at most {format_bytes(moved.most_host_bytes)} of host memory,"
                f" {format_bytes(moved.bytes_written)} written so far"
            )
    return losses


if __name__ == "__main__":
    train(parse())
