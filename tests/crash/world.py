"""A small training run with everything in it that a resumed run must find again.

Two dtypes, buffers, a frozen parameter, one that has a gradient only now and then, dropout and data
by the global generators, a schedule of the learning rate, accumulation.
"""

import hashlib
import random
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from models import AttentionBlock
from stopped import stop
from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.base.update_on import Overlap

WIDTH, WORDS, LENGTH, BATCH, MICRO = 40, 32, 8, 4, 2


@dataclass(frozen=True)
class Case:
    """The axes along which runs differ."""

    overlap: Overlap = "none"
    state_format: str | None = None
    commit_every: str | int | None = 3
    """None: by hand after every third step, behind the schedule's."""
    ram_budget: str | None = None
    states: str | float = "disk"
    pin_every: int = 0
    """Steps between snapshots; the last two are kept."""
    clips: bool = False
    """Whether the norm of gradients is limited, so that it clips three of five steps."""
    parameters: str | None = None
    """The tier of a plan for the whole model; None: the states alone leave memory."""
    steps: int = 20
    policy: Mapping[str, Any] = field(default_factory=dict)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10, requires_grad=False)
        self.blocks = nn.ModuleList(
            [AttentionBlock(WIDTH, 3 * WIDTH, dropout=0.1, is_causal=False) for _ in range(2)]
        )
        self.batch_norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.seldom = nn.Linear(WIDTH, WORDS, bias=False)
        """Has a gradient in every third step."""
        self.spare = nn.Linear(WIDTH, 3)
        """Never has one."""
        self.blocks.to(torch.bfloat16)
        self.seldom.to(torch.bfloat16)

    def forward(self, tokens: Tensor, *, seldom: bool) -> Tensor:
        x = (self.words(tokens) + self.places).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        flat = self.batch_norm(x.float().reshape(-1, WIDTH))
        logits: Tensor = self.head(flat)
        return logits + self.seldom(flat.to(torch.bfloat16)).float() if seldom else logits


def make_model() -> Model:
    torch.manual_seed(7)
    random.seed(7)
    return Model()


def make_optimizer(
    model: Model,
    case: Case,
    directory: Path | None,
    extra: Callable[[], dict[str, Any]] | None = None,
) -> AdamW:
    bare = [p for n, p in model.named_parameters() if p.ndim < 2 and n != "places"]
    dense = [p for p in model.parameters() if p.ndim >= 2]
    policy = {"chunk_elements": 4096, "backend": "threads", "depth": 4, **case.policy}
    stowed: dict[str, Any] = {}
    if directory is not None:
        stowed = {
            "states": case.states,
            "dir": directory,
            "ram_budget": case.ram_budget,
            "commit_every": case.commit_every,
            "extra": extra,
            "overlap": case.overlap,
            "module": model,
            "accumulation_steps": MICRO if case.overlap in {"backward", "speculative"} else 1,
        }
    options = {"lr": 3e-3, "state_format": case.state_format, "policy": PipelinePolicy(**policy)}
    if directory is not None and case.parameters is not None:
        return place(model, case, directory, {**options, "extra": extra})
    groups = [{"params": dense}, {"params": bare, "weight_decay": 0.0}]
    return AdamW(groups, **options, **stowed)


def place(model: Model, case: Case, directory: Path, options: dict[str, Any]) -> AdamW:
    """Place the whole model, by a plan with the case's tiers and overlap."""
    plan = Plan(
        parameters=case.parameters,
        states=case.states,
        overlap=case.overlap,
        accumulation_steps=MICRO,
        ram_budget=case.ram_budget,
    )

    def make(named: Iterable[tuple[str, nn.Parameter]], **given: Any) -> AdamW:  # noqa: ANN401
        pairs = list(named)
        dense = [p for _, p in pairs if p.ndim >= 2]
        bare = [p for _, p in pairs if p.ndim < 2]
        return AdamW([{"params": dense}, {"params": bare, "weight_decay": 0.0}], **given)

    placed, optimizer = stow(
        model,
        make,
        plan=plan,
        dir=directory,
        units=[*model.blocks, model.seldom],  # of one dtype each
        commit_every=case.commit_every,
        **options,
    )
    assert placed is model
    return optimizer


class World:
    """A run in the middle of it."""

    def __init__(self, case: Case, directory: Path | None = None) -> None:
        self.case = case
        self.model = make_model()
        self.optimizer = make_optimizer(self.model, case, directory, self.extra)
        self.step = 0
        self.durable = directory is not None
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=case.steps)

    def resume(self, which: str | int | None = None) -> int | None:
        """Go on where the directory says; what the generators are at comes with it."""
        step = self.optimizer.resume(which)
        if step is None:
            return None
        self.step = step
        extra = self.optimizer.extra
        torch.set_rng_state(extra["torch"])
        random.setstate(extra["python"])
        # It was made before, for that sets learning rates; those of the groups came back since.
        self.scheduler.load_state_dict(extra["schedule"])
        if not extra["by hand"]:  # the commit was made in step(), before the schedule's own step
            with warnings.catch_warnings():
                # Torch counts the steps of this process only, and warns at the run's second.
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler")
                self.scheduler.step()
        return step

    def start_afresh(self) -> None:
        """Take the draws of a run that begins: the ones behind the making of the model."""
        make_model()

    def extra(self, *, by_hand: bool = False) -> dict[str, Any]:
        """Return where generators and schedule are: tensors, tuples in tuples, nested dicts."""
        return {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "schedule": self.scheduler.state_dict(),
            "by hand": by_hand,
        }

    def train(self, until: int, told: Callable[[int, float], None] = lambda _, __: None) -> None:
        """Take steps; ``told`` gets the number of each and its loss."""
        while self.step < until:
            loss = self.backward()
            if self.case.clips:
                self.optimizer.clip_grad_norm_(1e-3 if self.step % 5 in {1, 3, 4} else 1e9)
            self.optimizer.step()
            self.step += 1
            self.scheduler.step()
            told(self.step, loss)
            if self.durable:
                self._keep()

    def backward(self) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for _ in range(MICRO):
            tokens = torch.randint(WORDS, (BATCH, LENGTH))
            wanted = (tokens * 3 + random.randrange(3)).reshape(-1) % WORDS  # noqa: S311
            logits = self.model(tokens, seldom=self.step % 3 == 2)
            loss = nn.functional.cross_entropy(logits, wanted) / MICRO
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        return total

    def _keep(self) -> None:
        if self.case.commit_every is None and self.step % 3 == 0:
            self.commit_by_hand()
        every = self.case.pin_every
        if every and self.step % every == 0:
            names = {name for summary in self.optimizer.snapshots() for name in summary.names}
            if f"at-{self.step}" not in names:
                # What step() committed is pinned; else this commits, behind the schedule's step.
                often = self.case.commit_every
                committed = isinstance(often, int) and self.step % often == 0
                extra = None if committed else self.extra(by_hand=True)
                self.optimizer.snapshot(f"at-{self.step}", extra)
            if f"at-{self.step - 2 * every}" in names:
                self.optimizer.drop(f"at-{self.step - 2 * every}")

    def commit_by_hand(self) -> None:
        self.optimizer.commit(self.extra(by_hand=True))

    def facts(self) -> dict[str, str]:
        """Return all that there is to know of the run, each thing by its bits."""
        return {name: digest(thing) for name, thing in self.things()}

    def things(self) -> Iterator[tuple[str, object]]:
        self.optimizer.wait()
        yield "step", self.step
        yield from self.model.state_dict().items()
        saved = self.optimizer.state_dict()
        yield "groups", saved["param_groups"]
        for number, entry in saved["state"].items():
            for name, value in entry.items():
                yield f"{name} of {number}", value
        yield "schedule", [self.scheduler.last_epoch, self.scheduler.get_last_lr()]
        yield "draws", [torch.get_rng_state(), repr(random.getstate())]

    def close(self) -> None:
        """Let everything go as a stop of the process does: what no commit has is lost."""
        stop(self.optimizer)


@cache
def undisturbed(
    state_format: str,
    steps: int = Case.steps,
    *,
    clips: bool = False,
    parameters: str | None = None,
) -> list[dict[str, str]]:
    """Return what a run that nothing happens to is, before its first step and after each.

    It is in RAM; one with a plan has the plan's tiers, and updates in ``step()``: the plan sums
    gradients of 16 bits in fp32.
    """
    here = torch.get_rng_state(), random.getstate()
    case = Case(state_format=state_format, steps=steps, clips=clips, parameters=parameters)
    with tempfile.TemporaryDirectory() as directory:
        world = World(case, None if parameters is None else Path(directory) / "run")
        world.start_afresh()
        facts = [world.facts()]
        for step in range(1, world.case.steps + 1):
            world.train(step)
            facts.append(world.facts())
        world.close()
    torch.set_rng_state(here[0])
    random.setstate(here[1])
    return facts


def digest(thing: object) -> str:
    if isinstance(thing, DTensor):
        thing = thing.full_tensor()
    if isinstance(thing, Tensor):
        raw = thing.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{thing.dtype} {tuple(thing.shape)} {hashlib.sha256(raw).hexdigest()}"
    if isinstance(thing, dict):
        return repr({key: digest(thing[key]) for key in sorted(thing, key=repr)})
    if isinstance(thing, list | tuple):
        return repr([digest(value) for value in thing])
    return repr(thing)


def differing(found: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Return the names of what is not the same."""
    return sorted(n for n in {*found, *wanted} if found.get(n) != wanted.get(n))
