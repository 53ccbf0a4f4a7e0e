"""The candidate: the same training as users write it, over tensorstow's optimizers."""

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from parity.axes import DTYPES, Case, Recipe, Route
from parity.problem import (
    DIV_SCALE,
    INF_STEP,
    INITIAL_SCALE,
    LEAST_NORM,
    LR,
    LR_FACTORS,
    RESUME_AFTER,
    STEPS,
    Model,
    Outcome,
    group_names,
    one_torch_thread,
)
from tensorstow import Adam, AdamW, PipelinePolicy, _native
from tensorstow.colossalai import CPUAdam, HybridAdam
from tensorstow.io.engine import probe_backend
from tensorstow.optim.layout import plan_ring
from tensorstow.optim.stowed import StowedAdam

ELSEWHERE = {"ram": "disk", "split": "ram", "disk": "split"}
"""Where a resumed run puts the states."""

Saved = dict[str, Any]


@dataclass(frozen=True)
class Taps:
    """Where a mutation may lay hands on the files of a run. Each gets the optimizer and step."""

    before_backward: Callable[[StowedAdam, int], None] = lambda _o, _s: None
    before_step: Callable[[StowedAdam, int], None] = lambda _o, _s: None
    after_step: Callable[[StowedAdam, int], None] = lambda _o, _s: None


NO_TAPS = Taps()


@one_torch_thread()
def run(case: Case, directory: Path, taps: Taps = NO_TAPS) -> Outcome:
    """Train as ``case`` says, with real files in ``directory``."""
    threads = _native.pool_threads()
    trainer = Trainer(case.recipe, case.route, directory)
    outcome = Outcome()
    try:
        for step in range(STEPS):
            loss = trainer.train(step, taps)
            if step == RESUME_AFTER:
                trainer = trainer.resume(outcome, loss)
            else:
                outcome.note(trainer.model, loss)
        outcome.states = trainer.states()
    finally:
        trainer.optimizer.close()
        _native.set_pool_threads(threads)
    return outcome


class Trainer:
    def __init__(self, recipe: Recipe, route: Route, directory: Path, seed: int = 1) -> None:
        self.recipe, self.route, self.directory = recipe, route, directory
        self.model = Model(recipe, seed)
        self.optimizer = make_optimizer(self.model, recipe, route, directory)
        _native.set_pool_threads(route.threads)
        self.scheduler: LambdaLR | None = None
        if recipe.lr.endswith("scheduled"):
            self.scheduler = LambdaLR(self.optimizer, lambda epoch: LR_FACTORS[epoch])
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=INITIAL_SCALE,
            growth_interval=2,
            enabled=recipe.scaling == "GradScaler",
        )

    def train(self, step: int, taps: Taps) -> float:
        """Take one step with ``backward`` for each micro-batch; return its loss."""
        self.optimizer.zero_grad()
        taps.before_backward(self.optimizer, step)
        loss_sum = 0.0
        for micro in range(self.recipe.accumulation):
            loss = self.model.loss(step, micro) / self.recipe.accumulation
            loss_sum += loss.item()
            self.backward(self.scaler.scale(loss))
        if step == INF_STEP and self.scaler.is_enabled():
            assert self.model.embedding.grad is not None
            self.model.embedding.grad.view(-1)[5] = torch.inf
        self.clip()
        taps.before_step(self.optimizer, step)
        if self.recipe.scaling == "div_scale":
            assert isinstance(self.optimizer, CPUAdam)
            self.optimizer.step(div_scale=DIV_SCALE)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
        taps.after_step(self.optimizer, step)
        return loss_sum

    def backward(self, loss: torch.Tensor) -> None:
        torch.autograd.backward(loss)

    def clip(self) -> None:
        if self.recipe.clipping == "none":
            return
        self.scaler.unscale_(self.optimizer)
        if self.recipe.clipping == "torch":
            first, second = groups_of(self.model)
            torch.nn.utils.clip_grad_norm_([*first, *second], LEAST_NORM)
        else:
            self.optimizer.clip_grad_norm_(LEAST_NORM)

    # --- resume ---

    def resume(self, outcome: Outcome, loss: float) -> "Trainer":
        """Note the step just taken; return the trainer that goes on."""
        if self.route.resume == "none":
            outcome.note(self.model, loss)
            return self
        saved = self.save()
        if self.route.resume == "rewind":
            outcome.note(self.model, loss)
            self.train(RESUME_AFTER + 1, NO_TAPS)  # a step that is then taken back
            self.load(saved)
            return self
        if self.route.resume == "torch":
            saved["optimizer"] = through_torch(self, saved["optimizer"])
        self.optimizer.close()
        route = replace(self.route, placement=ELSEWHERE[self.route.placement], ring="default")
        other = Trainer(self.recipe, route, self.directory, seed=2)
        other.load(saved)
        outcome.note(other.model, loss)
        return other

    def save(self) -> Saved:
        """Return everything, through the bytes of a file."""
        file = io.BytesIO()
        everything = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }
        torch.save(everything, file)
        file.seek(0)
        saved: Saved = torch.load(file, weights_only=True)
        return saved

    def load(self, saved: Saved) -> None:
        if self.route.resume == "model-last":
            self.optimizer.load_state_dict(saved["optimizer"])
            self.model.load_state_dict(saved["model"])
        else:
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])
        self.scaler.load_state_dict(saved["scaler"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(saved["scheduler"])

    def states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the states by the parameter's name."""
        first, second = group_names(self.model)
        names = [*first, *second]
        states = self.optimizer.state_dict()["state"]
        return {names[i]: {k: v.clone() for k, v in s.items()} for i, s in states.items()}


def through_torch(trainer: Trainer, state_dict: Saved) -> Saved:
    """Load into torch's own optimizer and save from there."""
    groups = [{"params": p} for p in groups_of(trainer.model)]
    maker = torch.optim.AdamW if trainer.recipe.decoupled else torch.optim.Adam
    optimizer = maker(groups, amsgrad=trainer.recipe.amsgrad)
    optimizer.load_state_dict(state_dict)
    return optimizer.state_dict()


def groups_of(model: Model) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    parameters = dict(model.named_parameters())
    first, second = group_names(model)
    return [parameters[n] for n in first], [parameters[n] for n in second]


def make_optimizer(model: Model, recipe: Recipe, route: Route, directory: Path) -> StowedAdam:
    first, second = groups_of(model)
    tensor = recipe.lr.startswith("tensor")

    def lr(base: float) -> Any:  # noqa: ANN401  # torch says float | Tensor
        return torch.tensor(base) if tensor else base

    groups: list[dict[str, Any]] = [
        {"params": first},
        {"params": second, "lr": lr(2 * LR), "betas": (0.8, 0.99), "weight_decay": 0.0},
    ]
    shared: dict[str, Any] = {
        "lr": lr(LR),
        "weight_decay": recipe.weight_decay,
        "amsgrad": recipe.amsgrad,
        "grad_dtype": None if recipe.grad_dtype == "own" else DTYPES[recipe.grad_dtype],
        "policy": policy_of(route),
    }
    if recipe.optimizer in {"AdamW", "Adam"}:
        own = AdamW if recipe.optimizer == "AdamW" else Adam
        return own(groups, maximize=recipe.maximize, **shared, **where(recipe, route, directory))
    for group in groups:
        group["maximize"] = recipe.maximize  # a keyword that upstream has not got
    upstream = HybridAdam if recipe.optimizer.startswith("Hybrid") else CPUAdam
    return upstream(
        groups,
        bias_correction=recipe.bias_correction,
        adamw_mode=recipe.decoupled,
        nvme_offload_fraction=route.fraction,
        nvme_offload_dir=str(directory),
        **shared,
    )


def where(recipe: Recipe, route: Route, directory: Path) -> dict[str, Any]:
    """Return the keywords that place the states."""
    if route.placement == "ram":
        return {"states": "ram"}
    states = "disk" if route.placement == "disk" else route.fraction
    budget = None
    if route.ring == "least":
        streams = 2 + recipe.amsgrad + (recipe.dtype != "fp32")
        sizes = plan_ring(streams=streams, chunk_elements=route.chunk, chunks=1, budget=1 << 30)
        budget = 2 * sizes.slot_bytes
    return {"states": states, "dir": directory, "ram_budget": budget}


def policy_of(route: Route) -> PipelinePolicy:
    """Return the policy; what this machine has not got is replaced by the best that it has."""
    return PipelinePolicy(
        chunk_elements=route.chunk,
        schedule=route.schedule,  # type: ignore[arg-type]  # an axis is text
        backend=route.backend if probe_backend(route.backend) is None else None,  # type: ignore[arg-type]
        isa=route.isa if route.isa in _native.supported_isas() else None,  # type: ignore[arg-type]
    )
