"""ZeRO-Offload: a GPT-2 of 10 billion parameters on one accelerator, its states in host memory.

The model and the configuration are those of DeepSpeed's tutorial "ZeRO-Offload": 50 layers of 4096,
activation checkpointing, stage 2, ``offload_optimizer`` on the CPU.

    python examples/deepspeed_zero_offload.py --bytes    # what it takes, without taking it
    python examples/deepspeed_zero_offload.py            # train it; torchrun for more ranks
    python examples/deepspeed_zero_offload.py --num-layers 2 --hidden-size 64 --vocabulary 512
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import tensorstow.deepspeed as deepspeed
from tensorstow.base.sizes import format_bytes
from tensorstow.base.tiers import Tier
from tensorstow.deepspeed.config.reading import read_settings
from tensorstow.deepspeed.plans import plan_of, state_format_of
from tensorstow.fsdp.units import units_of
from tensorstow.planner.placement import Conditions, bytes_of
from tensorstow.planner.sizes import Sizes

CONFIG = Path(__file__).with_suffix(".json")


class Block(nn.Module):
    """Attention and an MLP, each added to the stream."""

    def __init__(self, hidden: int, heads: int) -> None:
        """Make the layers of one block."""
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(hidden)
        self.queries_keys_values = nn.Linear(hidden, 3 * hidden)
        self.attended = nn.Linear(hidden, hidden)
        self.before_mlp = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the stream after the block."""
        heads = self.queries_keys_values(self.before_attention(x)).chunk(3, dim=-1)
        q, k, v = (h.unflatten(-1, (self.heads, -1)).transpose(1, 2) for h in heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attended(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Embedding(nn.Embedding):
    """Small first values, for the head is tied: a model without memory gets what stands here."""

    def reset_parameters(self) -> None:
        """Draw them as GPT-2 does."""
        nn.init.normal_(self.weight, std=0.02)


class GPT(nn.Module):
    """GPT-2 with a head that is tied to the embedding."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Make the model that the arguments describe."""
        super().__init__()
        hidden = args.hidden_size
        self.tokens = Embedding(args.vocabulary, hidden)
        self.positions = Embedding(args.sequence, hidden)
        self.blocks = nn.ModuleList(
            Block(hidden, args.num_attention_heads) for _ in range(args.num_layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.keeps_inputs_alone = args.checkpoint_activations

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits; blocks keep their inputs alone, unless they keep all activations."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            checkpointed = deepspeed.checkpointing.checkpoint if self.keeps_inputs_alone else _call
            x = checkpointed(block, x)
        return functional.linear(self.norm(x), self.tokens.weight)


def _call(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return the block's output, with all activations kept for backward."""
    return block(x)


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; without arguments it is the tutorial's."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (
        ("num-layers", 50),
        ("hidden-size", 4096),
        ("num-attention-heads", 32),
        ("sequence", 1024),
        ("vocabulary", 50304),
        ("steps", 10),
        ("batch-size", 10),
        ("model-parallel-size", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--bytes", action="store_true", help="print what it takes, and end")
    parser.add_argument(
        "--checkpoint-activations", action=argparse.BooleanOptionalAction, default=True
    )
    deepspeed.add_config_arguments(parser)
    parser.set_defaults(deepspeed_config=str(CONFIG))
    args = parser.parse_args(words)
    if args.model_parallel_size != 1:
        parser.error(
            "--model-parallel-size above 1 is Megatron's: here torchrun's ranks share the states"
            " (stages 1 to 3). Leave it out."
        )
    if args.bytes and not args.checkpoint_activations:
        parser.error("--bytes counts the inputs of blocks alone: use --checkpoint-activations.")
    return args


def config_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration, with the batch of the command line."""
    config = json.loads(Path(args.deepspeed_config).read_text("utf-8"))
    return {**config, "train_micro_batch_size_per_gpu": args.batch_size}


def needs(args: argparse.Namespace, ranks: int = 1) -> dict[Tier, int]:
    """Return the bytes on each tier of one rank, by arithmetic over a model without memory.

    On the device are weights, gradients on their way down, on more ranks than one the weights that
    are gathered, and the inputs that blocks keep; in host memory gradients, the weights that
    updates write, moments, and of fp32 masters the halves that bf16 weights do not say.
    """
    with torch.device("meta"):
        model = GPT(args).to(torch.bfloat16)
    settings = read_settings(config_of(args), ranks)
    sizes = Sizes.of(units_of(model), ranks)
    conditions = Conditions(device_is_host=False, state_format=state_format_of(torch.bfloat16))
    held = dict(bytes_of(plan_of(settings, device_is_host=False), sizes, conditions))
    inputs = args.num_layers * settings.batch.micro * args.sequence * args.hidden_size
    held[Tier.DEVICE] += inputs * torch.bfloat16.itemsize
    return held


def train(args: argparse.Namespace) -> list[float]:
    """Train on text that repeats itself, so that a falling loss is a model that learns."""
    torch.manual_seed(0)
    with torch.device("meta"):  # zero.Init would hold all of it in host memory first
        model = GPT(args)
    engine, *_ = deepspeed.initialize(model=model, config=config_of(args))
    losses = []
    for _ in range(args.steps):
        shape = (engine.train_micro_batch_size_per_gpu(), args.sequence)
        start = torch.randint(args.vocabulary, (shape[0], 1), device=engine.device)
        tokens = (start + torch.arange(shape[1], device=engine.device)) % args.vocabulary
        logits = engine(tokens[:, :-1]).float()
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if engine.global_rank == 0:
            print(f"step {engine.global_steps}: loss {losses[-1]:.3f}, lr {engine.get_lr()[0]:.2e}")
    engine.destroy()
    return losses


if __name__ == "__main__":
    arguments = parse()
    if arguments.bytes:
        for tier, nbytes in needs(arguments).items():
            print(f"{tier:>7}: {format_bytes(nbytes)}")
    else:
        train(arguments)
