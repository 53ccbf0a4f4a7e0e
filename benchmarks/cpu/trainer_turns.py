"""A Trainer and a loop by hand that train in turns: what ``trainer`` measures."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.cpu.models import SMALL
from benchmarks.measure import Sample
from tensorstow.base.plan import Plan
from tensorstow.fsdp.stow import stow
from tensorstow.integrations.late_adamw import LateAdamW
from tensorstow.integrations.transformers import Stowed, adamw

_STEPS = 3  # of a turn, the first one left out
_RATE, _CLIP = 1e-4, 1.0
_BATCH, _QUICK = (4, 128), (2, 16)
_OPTIONS: dict[str, Any] = {"lr": _RATE, "weight_decay": 0.0}


@dataclass(frozen=True, slots=True)
class Way:
    """Where a model and its states are."""

    name: str
    plan: Plan | None
    """None: the optimizer alone, with states in RAM."""

    def placement(self, folder: Path) -> dict[str, Any]:
        """Return the keywords of ``stow``."""
        return {"plan": self.plan, "dir": folder, "durability": "none"}


WAYS = (
    Way("states in RAM", None),
    Way("weights and states on disk", Plan(parameters="disk", states="disk")),
)


class Race:
    """The Trainer, and the loop that takes its turns between those of the Trainer."""

    def __init__(self, way: Way, folder: Path, *, quick: bool) -> None:
        """Make both, each with its model."""
        self._way, self._folder = way, folder
        dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        self._config = transformers.GPT2Config(**SMALL if quick else {}, **dropout)
        self._batch = _QUICK if quick else _BATCH
        self._seconds: dict[str, list[float]] = {"Trainer": [], "loop": []}

    def run(self, turns: int) -> None:
        """Train: one turn each that is not counted, then ``turns`` each."""
        steps = (1 + turns) * _STEPS
        generator = torch.Generator().manual_seed(1)
        rows = self._batch[0] * steps
        tokens = torch.randint(self._config.vocab_size, (rows, self._batch[1]), generator=generator)
        self._loop = _Loop(self._model(), self._way, self._folder, tokens, self._batch[0], steps)
        self._trainer = self._make_trainer(tokens, steps)
        self._trainer.add_callback(_Turns(self._loop, self._seconds))
        self._trainer.train()

    def samples(self) -> dict[str, Sample]:
        """Return the seconds of each step that counts."""
        counted = {
            name: [s for i, s in enumerate(seconds) if i >= _STEPS and i % _STEPS]
            for name, seconds in self._seconds.items()
        }
        return {name: Sample(tuple(seconds)) for name, seconds in counted.items()}

    def parameters_that_differ(self) -> int:
        """Return how many parameters of the two have other bits."""
        ours, theirs = self._trainer.model.state_dict(), self._loop.model.state_dict()
        return sum(not torch.equal(ours[name], theirs[name]) for name in theirs)

    def close(self) -> None:
        """Drop the optimizers' states and files."""
        _inner(self._trainer.optimizer).close()
        self._loop.optimizer.close()

    def _model(self) -> Any:  # noqa: ANN401  # another library's
        torch.manual_seed(0)
        made = transformers.GPT2LMHeadModel(self._config)
        made.loss_type = "ForCausalLM"  # its class name says none, and labels are counted by it
        return made.train()

    def _make_trainer(self, tokens: torch.Tensor, steps: int) -> transformers.Trainer:
        args = transformers.TrainingArguments(
            str(self._folder / "out"),
            use_cpu=True,
            max_steps=steps,
            train_sampling_strategy="sequential",
            per_device_train_batch_size=self._batch[0],
            learning_rate=_RATE,
            max_grad_norm=_CLIP,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data: Any = [{"input_ids": row, "labels": row} for row in tokens]
        if self._way.plan is not None:
            placement = self._way.placement(self._folder)
            return Stowed(self._model(), args, train_dataset=data, stow=placement)
        optimizer: Any = adamw(args)
        return transformers.Trainer(
            self._model(), args, train_dataset=data, optimizer_cls_and_kwargs=optimizer
        )


class _Loop:
    """The loop by hand: what the Trainer does for a step, and nothing else."""

    def __init__(
        self,
        model: torch.nn.Module,
        way: Way,
        folder: Path,
        tokens: torch.Tensor,
        rows: int,
        steps: int,
    ) -> None:
        self.model = model
        self.clip: Callable[[], object]
        if way.plan is None:
            self.optimizer: Any = LateAdamW()(model, **_OPTIONS)
            self.clip = lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        else:
            placed = way.placement(folder)
            del placed["durability"]
            make = partial(_made, model, durability="none", **_OPTIONS)
            _, self.optimizer = stow(model, make, **placed)
            self.clip = lambda: self.optimizer.clip_grad_norm_(_CLIP)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda n: max(0.0, (steps - n) / steps)
        )
        self._batches = iter(tokens.split(rows))

    def step(self) -> float:
        """Take a step; return the seconds it took."""
        start = time.perf_counter()
        ids = next(self._batches)
        items = torch.tensor(ids[:, 1:].numel())
        self.model(input_ids=ids, labels=ids, num_items_in_batch=items).loss.backward()
        self.clip()
        self.optimizer.step()
        self._schedule.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


class _Turns(transformers.TrainerCallback):
    """Takes the time of the Trainer's steps, and lets the loop have its turns."""

    def __init__(self, loop: _Loop, seconds: dict[str, list[float]]) -> None:
        self._loop, self._seconds = loop, seconds
        self._start = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Begin the first step."""
        self._start = time.perf_counter()

    def on_step_end(self, *_: object, **told: Any) -> None:  # noqa: ANN401
        """Note the time since the step before; after a turn's last step it is the loop's turn."""
        self._seconds["Trainer"].append(time.perf_counter() - self._start)
        if len(self._seconds["Trainer"]) % _STEPS == 0:
            _inner(told["optimizer"]).synchronize()
            for _ in range(_STEPS):
                self._seconds["loop"].append(self._loop.step())
            self._loop.optimizer.synchronize()
        self._start = time.perf_counter()


def _inner(optimizer: Any) -> Any:  # noqa: ANN401
    return getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper holds it


def _made(model: torch.nn.Module, _: object, **options: Any) -> Any:  # noqa: ANN401
    return LateAdamW()(model, **options)
