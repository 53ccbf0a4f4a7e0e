"""A step through DeepSpeed's door and through DeepSpeed itself, in turns in the same two ranks.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 \
        -m benchmarks.cpu.deepspeed_step --stage 2

It needs DeepSpeed, which compiles its collectives at the first run.
"""

import argparse
import copy
import importlib
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import tensorstow.deepspeed

WIDTH, LAYERS, HEADS, WORDS, TOKENS = 512, 6, 8, 2000, 128
UNTIMED = 2


class Layer(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what it makes of ``x``."""
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.first(x)).view(batch, tokens, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Layers between an embedding and a head, with their loss."""

    def __init__(self) -> None:
        """Make it."""
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each word from itself."""
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def main() -> None:
    """Print the medians of both, their ratio, and the last losses, which are to be equal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stage", type=int, default=2, help="the ZeRO stage")
    parser.add_argument("--steps", type=int, default=12, help="steps, of which 2 are not timed")
    options = parser.parse_args()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": options.stage},
    }
    torch.manual_seed(0)
    model = Transformer()
    models = {"ours": model, "DeepSpeed": copy.deepcopy(model)}
    tensorstow.deepspeed.init_distributed(dist_backend="gloo")
    theirs: Any = importlib.import_module("deepspeed")
    doors: dict[str, Any] = {"ours": tensorstow.deepspeed, "DeepSpeed": theirs}
    engines = {
        name: door.initialize(
            model=models[name], model_parameters=models[name].parameters(), config=config
        )[0]
        for name, door in doors.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    losses = dict.fromkeys(engines, 0.0)
    for number in range(options.steps):
        seeded = torch.Generator().manual_seed(2 * number + dist.get_rank())
        words = torch.randint(WORDS, (1, TOKENS), generator=seeded)
        for name, engine in engines.items():
            dist.barrier()
            start = time.perf_counter()
            loss = engine(words)
            engine.backward(loss)
            engine.step()
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
            losses[name] = loss.item()
    if dist.get_rank() == 0:
        medians = {name: statistics.median(taken[UNTIMED:]) for name, taken in seconds.items()}
        for name, median in medians.items():
            print(f"{name}: {1e3 * median:.0f} ms a step, last loss {losses[name]:.6f}")
        print(f"ratio {medians['ours'] / medians['DeepSpeed']:.2f}")


if __name__ == "__main__":
    main()
