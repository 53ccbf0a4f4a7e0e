"""A step through DeepSpeed's door and through DeepSpeed itself, in turns in the same two ranks.

A transformer of 21 million parameters in fp32, on the CPU, whose ranks have a core each. It needs
DeepSpeed, which compiles its collectives at the first run.
"""

import copy
import importlib
import importlib.util
import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import tensorstow.deepspeed
from benchmarks.measure import (
    Figure,
    Sample,
    Settings,
    at_most,
    exactly,
    lines_of,
    not_available,
    ratio,
)

WIDTH, LAYERS, HEADS, WORDS, TOKENS = 512, 6, 8, 2000, 128
STAGE, RANKS, UNTIMED = 2, 2, 2
_OURS, _THEIRS = "ours", "DeepSpeed"
_CHILD_SECONDS = 600


def figures(settings: Settings) -> Iterator[Figure]:
    """Train by both in two processes; compare their steps and their last losses."""
    name = f"stage {STAGE}, {RANKS} ranks: a step through our door / DeepSpeed's"
    if importlib.util.find_spec("deepspeed") is None:
        yield not_available(name, at_most(1.0), "DeepSpeed is not installed")
        return
    launcher = ("torch.distributed.run", "--nproc_per_node", str(RANKS))
    words = ("-m", "benchmarks.cpu.deepspeed_step", str(UNTIMED + settings.pairs))
    given = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    found = json.loads(lines_of(*launcher, *words, seconds=_CHILD_SECONDS, given=given)[-1])
    samples = {way: Sample(tuple(seconds)) for way, seconds in found["seconds"].items()}
    yield ratio(name, at_most(1.0), samples, _OURS, _THEIRS)
    differ = len(set(found["losses"].values())) - 1
    yield Figure(f"stage {STAGE}, {RANKS} ranks: last losses that differ", exactly(0), differ, "")


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


def train(steps: int) -> None:
    """Train by both; print the seconds of each step and the last losses."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": STAGE},
    }
    torch.manual_seed(0)
    model = Transformer()
    models = {_OURS: model, _THEIRS: copy.deepcopy(model)}
    tensorstow.deepspeed.init_distributed(dist_backend="gloo")
    theirs: Any = importlib.import_module("deepspeed")
    doors: dict[str, Any] = {_OURS: tensorstow.deepspeed, _THEIRS: theirs}
    engines = {
        name: door.initialize(
            model=models[name], model_parameters=models[name].parameters(), config=config
        )[0]
        for name, door in doors.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    losses = dict.fromkeys(engines, 0.0)
    for number in range(steps):
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
        timed = {name: taken[UNTIMED:] for name, taken in seconds.items()}
        print(json.dumps({"seconds": timed, "losses": losses}))


if __name__ == "__main__":
    train(int(sys.argv[1]))
