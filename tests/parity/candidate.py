"""The candidate: the same training as users write it, over tensorstow's optimizers."""

import io
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
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
from stopped import stop
from tensorstow import Adam, AdamW, PipelinePolicy, _native
from tensorstow.colossalai import CPUAdam, HybridAdam
from tensorstow.formats.state_format import StateFormat
from tensorstow.io.engine import probe_backend
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states import layout
from tensorstow.states.layout import Family, slot_bytes

ELSEWHERE = {"ram": "disk", "split": "ram", "disk": "split"}
"""Where a resumed run puts the states."""
OTHER_OVERLAP = {
    "none": "forward",
    "forward": "backward",
    "backward": "none",
    "speculative": "forward",
}
OTHER_FORMAT = {"default": "split", "split": "fp32", "fp32": "default"}
COMMIT_EVERY = 2
CRASHED_AT = RESUME_AFTER // COMMIT_EVERY * COMMIT_EVERY
"""Steps that the newest commit has when a run dies after RESUME_AFTER."""

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
    outcome = Outcome()
    # Of its own: a run that is stored there already is not begun anew.
    home = Path(tempfile.mkdtemp(dir=directory))
    with small_ring(case.recipe, case.route):
        trainer = Trainer(case.recipe, case.route, home)
    try:
        step, resumed = 0, False
        while step < STEPS:
            loss = trainer.train(step, taps)
            trainer.note(outcome, loss)
            step += 1
            if step == RESUME_AFTER + 1 and not resumed:
                trainer, step, resumed = *trainer.resume(outcome), True
        outcome.states = trainer.states()
    finally:
        trainer.optimizer.close()
        _native.set_pool_threads(threads)
    return outcome


@contextmanager
def small_ring(recipe: Recipe, route: Route) -> Iterator[None]:
    """Let a budget of little bytes buy more than the ring."""
    before = layout.DEFAULT_RING_BYTES
    if route.share == "some":
        layout.DEFAULT_RING_BYTES = 2 * slot_of(recipe, route)
    try:
        yield
    finally:
        layout.DEFAULT_RING_BYTES = before


class Trainer:
    def __init__(self, recipe: Recipe, route: Route, directory: Path, seed: int = 1) -> None:
        self.recipe, self.route, self.directory = recipe, route, directory
        directory.mkdir(exist_ok=True)
        self.model = Model(recipe, seed)
        self.optimizer = make_optimizer(self.model, recipe, route, directory)
        _native.set_pool_threads(route.threads)
        self.scheduler: LambdaLR | None = None
        if recipe.lr.endswith("scheduled"):
            self.scheduler = LambdaLR(self.optimizer, lambda epoch: LR_FACTORS[epoch])
        self.scaler = torch.amp.GradScaler(
            self.model.embedding.device.type,
            init_scale=INITIAL_SCALE,
            growth_interval=2,
            enabled=recipe.scaling == "GradScaler",
        )

    def train(self, step: int, taps: Taps) -> Tensor:
        """Take one step with ``backward`` for each micro-batch; return its loss."""
        self.optimizer.zero_grad()
        taps.before_backward(self.optimizer, step)
        losses = []
        for micro in range(self.recipe.accumulation):
            loss = self.model.loss(step, micro) / self.recipe.accumulation
            losses.append(loss.detach())  # nobody waits for the device to look at it
            with self.adding_up(micro):
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
        return torch.stack(losses).double().sum()

    def note(self, outcome: Outcome, loss: Tensor, *, look: bool = False) -> None:
        """Note a step; where the next forward runs beside its updates, let it, mostly."""
        step = len(outcome.losses)
        if self.route.overlap != "forward" or look or step in {RESUME_AFTER, STEPS - 1}:
            self.optimizer.wait()  # as for all reads of parameters outside of forward
            outcome.note(self.model, loss)
        else:
            outcome.note(None, loss)

    def adding_up(self, micro: int) -> AbstractContextManager[None]:
        last = micro == self.recipe.accumulation - 1
        if last or self.route.final == "counted":
            return nullcontext()
        return self.optimizer.accumulate()

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

    def resume(self, outcome: Outcome) -> "tuple[Trainer, int]":
        """Return the trainer that goes on, and with which step."""
        way = self.route.resume
        if way == "none":
            return self, RESUME_AFTER + 1
        if way in {"commit", "crash"}:
            return self.resume_from_store(outcome)
        saved = self.save()
        if way == "rewind":
            self.train(RESUME_AFTER + 1, NO_TAPS)  # a step that is then taken back
            self.load(saved)
            return self, RESUME_AFTER + 1
        if way == "torch":
            saved["optimizer"] = through_torch(self, saved["optimizer"])
        self.optimizer.close()
        other = Trainer(self.recipe, self.other_route(), self.directory / "other", seed=2)
        other.load(saved)
        self.check_weights(other, outcome)
        return other, RESUME_AFTER + 1

    def resume_from_store(self, outcome: Outcome) -> "tuple[Trainer, int]":
        """Go on from what the last commit has; a crash is one that nobody asked for."""
        done = CRASHED_AT
        if self.route.resume == "commit":
            done = self.optimizer.commit(self.beside())
        stop(self.optimizer)
        other = Trainer(self.recipe, self.other_route(), self.directory, seed=2)
        assert other.optimizer.resume() == done
        if self.route.resume == "commit":
            other.load_beside(other.optimizer.extra)
        elif other.scheduler is not None:  # the commit was made before the scheduler's step
            state = other.scheduler.state_dict()
            other.scheduler.load_state_dict({**state, "last_epoch": done - 1, "_step_count": done})
            other.scheduler.step()
        del outcome.weights[done:], outcome.losses[done:]
        self.check_weights(other, outcome)
        return other, done

    @staticmethod
    def check_weights(other: "Trainer", outcome: Outcome) -> None:
        """Note the loaded weights in place of those that were saved: they must be the same."""
        loss = outcome.losses.pop()
        outcome.weights.pop()
        other.note(outcome, loss, look=True)

    def other_route(self) -> Route:
        """Return a route that differs from this one in whatever may differ."""
        route, recipe = self.route, self.recipe
        stored = route.resume in {"commit", "crash"}
        other = replace(route, placement=ELSEWHERE[route.placement], ring="default", share="none")
        if recipe.optimizer not in {"AdamW", "Adam"}:
            return other
        overlap = OTHER_OVERLAP[route.overlap]
        if route.update_on != "host":
            # A stored run goes on there where nobody says otherwise; a state_dict, anywhere.
            beside = "backward" if route.overlap == "none" else "none"
            overlap = beside if stored else "forward"
        if overlap == "backward" and (recipe.clipping != "none" or recipe.scaling != "none"):
            overlap = "none"
        return replace(
            other,
            overlap=overlap,
            update_on="unsaid" if stored else "host",
            # How states are kept is the store's; a state_dict goes into any format.
            format="default" if stored or recipe.ema else OTHER_FORMAT[route.format],
            durability="commit" if stored or route.durability == "none" else "none",
        )

    def save(self) -> Saved:
        """Return everything, through the bytes of a file."""
        file = io.BytesIO()
        everything = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "beside": self.beside(),
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
        self.load_beside(saved["beside"])

    def beside(self) -> Saved:
        """Return what a caller keeps beside the model and the optimizer."""
        scheduler = None if self.scheduler is None else self.scheduler.state_dict()
        return {"scaler": self.scaler.state_dict(), "scheduler": scheduler}

    def load_beside(self, saved: Saved) -> None:
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
        return own(
            groups,
            maximize=recipe.maximize,
            ema=recipe.ema or None,
            **shared,
            **where(model, recipe, route, directory),
            **when(model, recipe, route),
        )
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


def where(model: Model, recipe: Recipe, route: Route, directory: Path) -> dict[str, Any]:
    """Return the keywords that place the states."""
    states = route.placement if route.placement != "split" else route.fraction
    if route.durability == "none" and route.placement == "ram":
        return {"states": "ram"}
    budget = None
    if route.ring == "least":
        budget = 2 * slot_of(recipe, route)
    if route.share == "some":
        budget = 2 * slot_of(recipe, route) + int(0.75 * route.fraction * all_states(model, recipe))
    return {
        "states": states,
        "dir": directory,
        "ram_budget": budget,
        "durability": route.durability,
        "commit_every": COMMIT_EVERY,
    }


def when(model: Model, recipe: Recipe, route: Route) -> dict[str, Any]:
    """Return the keywords that say when states move, and as what."""
    counted = route.overlap in {"backward", "speculative"} and route.final == "counted"
    return {
        "overlap": route.overlap,
        "module": model,
        "accumulation_steps": recipe.accumulation if counted else 1,
        "state_format": None if route.format == "default" else route.format,
        "update_on": None if route.update_on == "unsaid" else route.update_on,
    }


def largest_family(recipe: Recipe) -> Family:
    dtype = torch.float32 if recipe.dtype == "fp32" else torch.float16
    return Family(dtype, recipe.amsgrad, StateFormat.FP32, bool(recipe.ema))


def slot_of(recipe: Recipe, route: Route) -> int:
    """Return the bytes of a slot that takes any chunk of the run."""
    commits = route.durability == "commit"
    room = slot_bytes(largest_family(recipe), route.chunk, with_weights=commits)
    if recipe.dtype == "mixed":
        fp32 = Family(torch.float32, recipe.amsgrad, StateFormat.FP32, bool(recipe.ema))
        room = max(room, slot_bytes(fp32, route.chunk, with_weights=commits))
    return room


def all_states(model: Model, recipe: Recipe) -> int:
    return largest_family(recipe).state_bytes(sum(p.numel() for p in model.parameters()))


def policy_of(route: Route) -> PipelinePolicy:
    """Return the policy; what this machine has not got is replaced by the best that it has."""
    return PipelinePolicy(
        chunk_elements=route.chunk,
        nan_until_published=route.nan_until_published,
        schedule=route.schedule,  # type: ignore[arg-type]  # an axis is text
        backend=route.backend if probe_backend(route.backend) is None else None,  # type: ignore[arg-type]
        isa=route.isa if route.isa in _native.supported_isas() else None,  # type: ignore[arg-type]
    )
