"""Saved checkpoints of each door that writes files, and how they are loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from ranks.driven import closing
from ranks.zero_read import Words, engine_for
from tensorstow import AdamW, save_safetensors
from tensorstow.colossalai.adam import HybridAdam
from tensorstow.colossalai.booster import Booster
from tensorstow.colossalai.booster.plugin import GeminiPlugin


@dataclass(frozen=True)
class Door:
    """Something that saves and loads."""

    save: Callable[[Path], object]
    load: Callable[[Path], object]
    contents: Callable[[], list[torch.Tensor]]
    """Whatever a load changes."""


@contextmanager
def gemini(*, shard: bool, use_safetensors: bool = False) -> Iterator[Door]:
    """Open ColossalAI's door."""
    booster = Booster(plugin=GeminiPlugin())
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    given = HybridAdam(layers.parameters(), lr=0.5)
    model, optimizer, _, _, schedule = booster.boost(
        layers, given, lr_scheduler=ExponentialLR(given, 0.9)
    )
    model(torch.ones(1, 16)).sum().backward()
    optimizer.step()
    end = ".safetensors" if use_safetensors and not shard else ""

    def save(folder: Path) -> None:
        booster.save_model(
            model, folder / f"model{end}", shard=shard, use_safetensors=use_safetensors
        )
        booster.save_optimizer(optimizer, folder / "optimizer", shard=shard)
        booster.save_lr_scheduler(schedule, folder / "schedule")

    def load(folder: Path) -> None:
        booster.load_model(model, folder / f"model{end}")
        booster.load_optimizer(optimizer, folder / "optimizer")
        booster.load_lr_scheduler(schedule, folder / "schedule")

    def contents() -> list[torch.Tensor]:
        states = optimizer.state_dict()
        kept = [t for entry in states["state"].values() for t in entry.values()]
        rates = [torch.tensor([float(group["lr"])]) for group in states["param_groups"]]
        return [t.detach().clone() for t in (*model.state_dict().values(), *kept, *rates)]

    yield Door(save, load, contents)
    optimizer.close()


@contextmanager
def deepspeed() -> Iterator[Door]:
    """Open DeepSpeed's door."""
    with closing(engine_for(2)) as engine:
        engine.backward(engine(torch.arange(7)))
        engine.step()

        def save(folder: Path) -> None:
            engine.save_checkpoint(folder, client_state={"epoch": 7})
            engine.save_16bit_model(folder)

        def load(folder: Path) -> None:
            Booster(plugin=GeminiPlugin()).load_model(Words(), folder / "pytorch_model.bin")
            engine.load_checkpoint(folder)

        def contents() -> list[torch.Tensor]:
            states: dict[str, Any] = engine.optimizer.state_dict()
            kept = [t for entry in states["state"].values() for t in entry.values()]
            counts = (engine.global_steps, engine.micro_steps, engine.global_samples)
            numbers = [float(group["lr"]) for group in engine.optimizer.param_groups]
            numbers += [*counts, engine.skipped_steps, engine.lr_scheduler.last_batch_iteration]
            grads = [p.grad for p in engine.module.parameters() if p.grad is not None]
            weights = engine.module.state_dict().values()
            rest = torch.tensor(numbers, dtype=torch.float64)
            return [t.detach().clone() for t in (*weights, *kept, *grads, rest)]

        yield Door(save, load, contents)


@contextmanager
def files() -> Iterator[Door]:
    """Write what needs no door: safetensors of a model in several files, and of states."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()

    def save(folder: Path) -> None:
        save_safetensors(model, folder / "model", max_shard_bytes=100)
        optimizer.save_safetensors(folder / "states.safetensors")

    yield Door(save, lambda _: None, list)
    optimizer.close()


DOORS: dict[str, Callable[[], Any]] = {
    "Gemini, one file": partial(gemini, shard=False),
    "Gemini, several files": partial(gemini, shard=True),
    "Gemini, one safetensors": partial(gemini, shard=False, use_safetensors=True),
    "Gemini, several safetensors": partial(gemini, shard=True, use_safetensors=True),
    "DeepSpeed": deepspeed,
}
