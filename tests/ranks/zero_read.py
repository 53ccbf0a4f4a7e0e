"""Loading checkpoints in DeepSpeed's own layout into engines: what tests call in each rank."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensorstow.deepspeed as deepspeed
from ranks.driven import closing
from ranks.twin import whole
from tensorstow.base.errors import StowError
from tensorstow.deepspeed.runtime.engine import DeepSpeedEngine
from tensorstow.deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from tensorstow.fsdp.full_tensors import resharded
from zero_written import STATES, ZeroRun

HYPER = [
    {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": decay, "amsgrad": False}
    for decay in (0.1, 0.0)
]


class Words(nn.Module):
    """A tied embedding, a frozen layer, a buffer, and sizes that no number of ranks divides."""

    def __init__(self) -> None:
        """Create the model."""
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.hidden = nn.Linear(5, 3)
        self.out = nn.Linear(3, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        x = self.embedding(ids)
        x = self.frozen(x) * self.table.to(x.dtype)
        logits = self.head(self.out(torch.tanh(self.hidden(x))))
        return nn.functional.cross_entropy(logits.float(), ids)


@dataclass
class Held:
    """What an engine has once it has loaded."""

    trained: dict[str, dict[str, torch.Tensor]]
    others: dict[str, torch.Tensor]
    counts: tuple[int, ...]
    client: dict[str, Any] | None
    groups: list[dict[str, Any]]
    scale: float
    scheduled: int
    after: dict[str, torch.Tensor]
    """Weights after a step."""


def decays(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, of other weight decay than was saved."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.5},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.5},
    ]


def run_of(dtype: torch.dtype = torch.float32, **more: Any) -> ZeroRun:  # noqa: ANN401
    """Return a run of the model, of numbers drawn."""
    model, groups = Words(), []
    names = {id(p): name for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(3)
    for group in decays(model):
        groups.append({})
        for parameter in group["params"]:
            drawn = [torch.rand(parameter.shape, generator=generator) for _ in range(3)]
            groups[-1][names[id(parameter)]] = dict(zip(("fp32", *STATES), drawn, strict=True))
    return ZeroRun(
        groups,
        HYPER,
        {
            name: torch.rand(p.shape).to(dtype)
            for name, p in model.named_parameters()
            if not p.requires_grad
        },
        {"table": torch.rand(5)},
        {"head.weight": "embedding.weight"},
        list(model.state_dict()),
        dtype,
        client={"epoch": 7, "names": ["a", "b"]},
        scheduler={"last_batch_iteration": 2},
        **more,
    )


def engine_for(
    stage: int,
    dtype: str = "fp32",
    place: str | None = None,
    *,
    model: nn.Module | None = None,
    kind: str | None = "AdamW",
    load_universal: bool = False,
) -> DeepSpeedEngine:
    """Return an engine of the model; ``place``: the directory of weights and states on disk."""
    zero: dict[str, Any] = {"stage": stage}
    if place is not None:
        for section in ("offload_optimizer", "offload_param"):
            zero[section] = {"device": "nvme", "nvme_path": place}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "checkpoint": {"load_universal": load_universal},
        "steps_per_print": 100,
    }
    if kind is not None:
        momentum = {"momentum": 0.9} if kind == "SGD" else {}
        config["optimizer"] = {"type": kind, "params": {"lr": 0.1, **momentum}}
        params = {"warmup_max_lr": 0.04, "warmup_num_steps": 8}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    model = Words() if model is None else model
    groups = decays(model) if kind is not None else None
    engine, *_ = deepspeed.initialize(model=model, model_parameters=groups, config=config)
    return engine


def trained_states(module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """Return whole fp32 weights and states."""
    found = {}
    for name, parameter in resharded(module).named_parameters():
        if parameter.requires_grad:
            kept = {k: safe_get_full_optimizer_state(parameter, k) for k in STATES}
            found[name] = {"fp32": safe_get_full_fp32_param(parameter), **kept}
    return found


def saved_by_engine(folder: str, stage: int, dtype: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train two steps, save, and return what was held."""
    with closing(engine_for(stage, dtype)) as engine:
        for _ in range(2):
            engine.backward(engine(torch.arange(7)))
            engine.step()
        engine.save_checkpoint(folder, "one", {"epoch": 7})
        return trained_states(engine.module)


def errors_of_loading(folder: str) -> str | None:
    """Load what ``saved_by_engine`` saved; return what kept it from being loaded."""
    with closing(engine_for(2)) as engine:
        try:
            engine.load_checkpoint(folder)
        except StowError as error:
            return str(error)
    return None


def loaded_from(
    folder: str, stage: int, dtype: str = "fp32", place: str | None = None, **more: bool
) -> Held:
    """Load a checkpoint, look at what is held, and take a step."""
    with closing(engine_for(stage, dtype, place)) as engine:
        path, client = engine.load_checkpoint(folder, "saved", **more)
        assert path == str(Path(folder) / "saved")
        named = dict(resharded(engine.module).named_parameters())
        trained, others = trained_states(engine.module), dict(engine.module.named_buffers())
        others |= {name: whole(parameter) for name, parameter in named.items()}
        counts = (engine.global_steps, engine.skipped_steps, engine.global_samples)
        groups = [{k: g[k] for k in HYPER[0]} for g in engine.optimizer.param_groups]
        scale, scheduled = engine.loss_scale, engine.lr_scheduler.last_batch_iteration
        engine.backward(engine(torch.arange(7)))
        engine.step()
        after = {n: safe_get_full_fp32_param(p) for n, p in named.items() if p.requires_grad}
        return Held(trained, others, counts, client, groups, scale, scheduled, after)
