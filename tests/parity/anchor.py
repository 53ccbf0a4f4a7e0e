"""The anchor: a loop of its own over ``adam_reference``, with nothing of the optimizers in it."""

import dataclasses
import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from parity.axes import DTYPES, Recipe
from parity.problem import (
    DIV_SCALE,
    INF_STEP,
    INITIAL_SCALE,
    LEAST_NORM,
    LR,
    LR_FACTORS,
    STEPS,
    Model,
    Outcome,
    group_names,
    one_torch_thread,
)
from tensorstow.formats.reference import (
    AdamState,
    adam_reference,
    adam_scalars,
    squared_norm_reference,
)

Gradients = dict[str, Tensor]


@cache
@one_torch_thread()
def anchor(recipe: Recipe) -> Outcome:
    """Train with everything in plain tensors; every placement must give these bits."""
    trainer = Trainer(recipe)
    outcome = Outcome()
    for step in range(STEPS):
        outcome.note(trainer.model, trainer.train(step))
    outcome.states = {n: dict(trainer.state_of(n)) for n in trainer.states}
    return outcome


class Trainer:
    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model = Model(recipe)
        self.parameters = dict(self.model.named_parameters())
        self.states: dict[str, AdamState] = {}
        self.steps: dict[str, int] = {}
        self.scale = INITIAL_SCALE if recipe.scaling == "GradScaler" else 1.0
        self.good_steps = 0
        # Which dtype a gradient has is torch's own affair; without it autograd rounds otherwise.
        if recipe.grad_dtype != "own":
            for parameter in self.parameters.values():
                parameter.grad_dtype = DTYPES[recipe.grad_dtype]

    def train(self, step: int) -> Tensor:
        """Take one step; return its loss."""
        gradients, loss = self.gradients(step)
        factor = 1.0 / DIV_SCALE if self.recipe.scaling == "div_scale" else 1.0
        if self.recipe.scaling == "GradScaler":
            if step == INF_STEP:
                gradients["embedding"].view(-1)[5] = torch.inf
            if not self.all_finite(gradients):
                self.scale /= 2
                self.good_steps = 0
                return loss
            factor = 1.0 / self.scale
            if self.recipe.clipping != "none":
                gradients = {n: (g.float() * factor).to(g.dtype) for n, g in gradients.items()}
                factor = 1.0
        if self.recipe.clipping == "torch":
            self.clip_as_torch(gradients)
        if self.recipe.clipping == "ours":
            factor *= self.clip_factor(gradients)
        self.update(step, gradients, factor)
        if self.recipe.scaling == "GradScaler":
            self.good_steps += 1
            if self.good_steps == 2:
                self.scale *= 2
                self.good_steps = 0
        return loss

    def gradients(self, step: int) -> tuple[Gradients, Tensor]:
        """Add up the gradients of the micro-batches, one ``torch.autograd.grad`` each."""
        trained = {n: p for n, p in self.parameters.items() if p.requires_grad}
        total: Gradients = {}
        losses = []
        for micro in range(self.recipe.accumulation):
            loss = self.model.loss(step, micro) / self.recipe.accumulation
            losses.append(loss.detach())
            scaled = loss * torch.tensor(self.scale)
            parts = torch.autograd.grad(scaled, list(trained.values()), allow_unused=True)
            for name, part in zip(trained, parts, strict=True):
                if part is not None:
                    total[name] = total[name] + part if name in total else part.clone()
        return total, torch.stack(losses).double().sum()

    @staticmethod
    def all_finite(gradients: Gradients) -> bool:
        return all(bool(torch.isfinite(g).all()) for g in gradients.values())

    def in_group_order(self, gradients: Gradients) -> Iterator[Tensor]:
        for names in group_names(self.model):
            yield from (gradients[n] for n in names if n in gradients)

    def clip_as_torch(self, gradients: Gradients) -> None:
        """Do what torch.nn.utils.clip_grad_norm_ documents, tensor by tensor.

        Only the norm is torch's own: it adds by dtype, in an order that is nobody's business.
        """
        norm = torch.nn.utils.get_total_norm(self.in_group_order(gradients))
        factor = torch.clamp(LEAST_NORM / (norm + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient.mul_(factor.to(gradient.device))

    def clip_factor(self, gradients: Gradients) -> float:
        total = 0.0
        for gradient in self.in_group_order(gradients):
            total += squared_norm_of(gradient)
        return min(1.0, LEAST_NORM / (math.sqrt(total) + 1e-6))

    @torch.no_grad()
    def update(self, step: int, gradients: Gradients, factor: float) -> None:
        second = group_names(self.model)[1]
        for name, gradient in gradients.items():
            parameter = self.parameters[name]
            if name not in self.states:
                self.begin(name)
            self.steps[name] += 1
            scalars = adam_scalars(
                lr=self.lr(step, 2 * LR if name in second else LR),
                betas=(0.8, 0.99) if name in second else (0.9, 0.999),
                eps=1e-8,
                weight_decay=0.0 if name in second else self.recipe.weight_decay,
                step=self.steps[name],
                decoupled=self.recipe.decoupled,
                bias_correction=self.recipe.bias_correction,
                grad_factor=-factor if self.recipe.maximize else factor,
                ema_weight=1.0 if self.steps[name] == 1 else 1.0 - self.recipe.ema,
            )
            here = parameter.cpu()
            adam_reference(here, gradient.cpu(), self.states[name], scalars)
            parameter.copy_(here)

    def begin(self, name: str) -> None:
        zeros = torch.zeros(self.parameters[name].shape)
        parameter = self.parameters[name].detach().cpu()
        self.states[name] = AdamState(
            zeros.clone(),
            zeros.clone(),
            master=None if parameter.dtype == torch.float32 else parameter.float(),
            vmax=zeros.clone() if self.recipe.amsgrad else None,
            ema=zeros.clone() if self.recipe.ema else None,
        )
        self.steps[name] = 0

    def lr(self, step: int, base: float) -> float:
        factor = LR_FACTORS[step] if self.recipe.lr.endswith("scheduled") else 1.0
        if self.recipe.lr.startswith("tensor"):
            return float(torch.tensor(base)) * factor
        return base * factor

    def state_of(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """Yield one parameter's states as ``state_dict`` names them."""
        yield "step", torch.tensor(float(self.steps[name]))
        for ours, named in NAMES.items():
            value = getattr(self.states[name], ours)
            if value is not None:
                yield named, value


def squared_norm_of(gradient: Tensor) -> float:
    if gradient.is_cpu:
        return squared_norm_reference(gradient)
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64).item()  # the device's own sum
    return norm * norm


NAMES = {
    "m": "exp_avg",
    "v": "exp_avg_sq",
    "vmax": "max_exp_avg_sq",
    "master": "master",
    "ema": "ema",
}
assert set(NAMES) == {f.name for f in dataclasses.fields(AdamState)}
