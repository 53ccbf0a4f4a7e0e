"""The README and the guides: every block of Python runs as printed, what is named is there.

Blocks import what they use. What a reader has before (a model, a batch, the optimizer of the block
above) comes from the prelude below: fresh for every block, the whole of it for all. Names of places
on disk (/nvme, /other-disk) are put below a temporary directory.
"""

import argparse
import gc
import importlib.util
import json
import re
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import tensorstow
import trainers
from remote import make_remote
from tensorstow.cli.main import make_parser
from tree import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "docs/tutorial.md",
    ROOT / "docs/concepts.md",
    *sorted((ROOT / "docs/guides").glob("*.md")),
]
ALL = [*PAGES, *(ROOT / name for name in ("CONTRIBUTING.md", "ARCHITECTURE.md", "docs/roadmap.md"))]
SIZE = 6
STEPS = 3


@dataclass
class Output:
    loss: torch.Tensor


class Model(nn.Module):
    """Blocks and a head, as a language model has them; returns what transformers' do."""

    def __init__(self, size: int = SIZE) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(2))
        self.head = nn.Linear(size, 1)

    def forward(self, x: torch.Tensor) -> Output:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return Output(self.head(x).square().mean())


class LossModel(Model):
    """Returns the loss itself, as DeepSpeed's examples do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x).loss


def durable(model: nn.Module, place: Path) -> tensorstow.AdamW:
    """Return the optimizer of the block above: it has taken a step, and a gradient is there."""
    optimizer = tensorstow.AdamW(
        model.parameters(),
        states="disk",
        dir=place / "before",
        module=model,
        extra=lambda: {"torch": torch.get_rng_state(), "python": (3, (1,) * 625, None)},
    )
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, SIZE)).loss.backward()
        optimizer.step()
    return optimizer


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.amp.GradScaler:
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(model(torch.randn(2, SIZE)).loss).backward()
    return scaler


def grouped(named: list[tuple[str, torch.Tensor]], **placement: Any) -> tensorstow.AdamW:  # noqa: ANN401
    return tensorstow.AdamW(named, lr=1e-4, **placement)


def prelude(place: Path, code: str) -> dict[str, Any]:
    """Return what a reader has before a block: what it uses of this, made in this order."""
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    (place / "ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    (place / "checkpoint").mkdir()
    save_file(Model().state_dict(), place / "checkpoint/model.safetensors")
    of_transformers = "from transformers import" in code
    plain = LossModel if "deepspeed" in code else Model
    made: dict[str, Any] = {"model": trainers.model() if of_transformers else plain()}
    makers: dict[str, Callable[[], object]] = {
        "Model": lambda: Model,
        "make_model": lambda: Model,
        "config": lambda: SIZE,
        "args": SimpleNamespace,
        "matrices": lambda: [p for p in made["model"].parameters() if p.ndim == 2],
        "steps": lambda: STEPS,
        "start": lambda: None,
        "step": lambda: 1000,
        "epoch": lambda: 1,
        "tensor": lambda: torch.arange(5000.0),
        "batch": lambda: lambda _: torch.randn(2, SIZE),
        "dataset": lambda: trainers.examples(2) if of_transformers else torch.randn(4, SIZE),
        "loader": lambda: DataLoader([{"x": torch.randn(SIZE)} for _ in range(4)], batch_size=2),
        "schedule": lambda: lambda step: 1 / (step + 1),
        "extra": lambda: lambda: {"epoch": 1},
        "optimizer": lambda: durable(made["model"], place),
        "scheduler": lambda: torch.optim.lr_scheduler.LambdaLR(made["optimizer"], lambda _: 1.0),
        "scaler": lambda: scaled(made["model"], made["optimizer"]),
        "theirs": lambda: torch.optim.AdamW(made["model"].parameters()),
        "make": lambda: grouped,
        "plan": tensorstow.Plan,
        "arrays": dict,
        "copy_to_shared_memory": lambda: lambda _: None,
        "side": nullcontext,
    }
    taken = _taken_of(code)
    if "theirs" in taken:  # the file that the block above has written
        durable(made["model"], place).save_safetensors(place / "states.safetensors")
    for name, make in makers.items():
        if name in taken:
            made[name] = make()
    return made


def _taken_of(code: str) -> set[str]:
    """Return the names that a block has in it, but for an optimizer that it makes itself."""
    used = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", code))
    made = re.search(r"^\s*(?:\w+, )*optimizer(?:, \w+)* = ", code, re.MULTILINE)
    if used & {"scheduler", "scaler"} and made is None:
        used.add("optimizer")
    return used - {"optimizer", "scheduler"} if made else used


@dataclass
class Block:
    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            assert match[1] == "python", f"{page.name} has a block of {match[1] or 'no language'}"
            yield Block(page, text[: match.start()].count("\n") + 1, match[2])


# torch's, of a process alone that saves what torch.distributed.checkpoint is also for
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true")  # transformers'
@pytest.mark.filterwarnings("ignore:.*does not have many workers")  # Lightning's
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec")  # Lightning's
@pytest.mark.usefixtures("kept_environment")  # Lightning writes a rank's variables
@pytest.mark.parametrize("block", list(blocks()), ids=str)
def test_a_block_runs_as_printed(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = prelude(tmp_path, block.code)
    if 'update_on="device"' in block.code and not torch.accelerator.is_available():
        make_remote(monkeypatch)  # the CPU stands in
    has_group, on_term = dist.is_initialized(), signal.getsignal(signal.SIGTERM)
    code = re.sub(r'"(/nvme|/other-disk)', lambda m: f'"{tmp_path}{m[1]}', block.code)
    try:
        exec(compile("\n" * block.line + code, str(block.page), "exec"), names)  # noqa: S102
    finally:
        signal.signal(signal.SIGTERM, on_term)
        for name in ("engine", "optimizer", "offloader"):
            for end in ("destroy", "close"):
                getattr(names.get(name), end, lambda: None)()
        trainer, held = names.get("trainer"), [names.get("optimizer")]
        held += getattr(trainer, "optimizers", [getattr(trainer, "optimizer", None)])
        for wrapper in held:  # accelerate's and Lightning's
            getattr(getattr(wrapper, "optimizer", None), "close", lambda: None)()
        names.clear()
        gc.collect()
        if dist.is_initialized() and not has_group:
            dist.destroy_process_group()


def code_of(page: Path) -> list[str]:
    """Return what a page shows as code outside of blocks of Python: spans and indented lines."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text) + re.findall(r"^ {4}(\S.*)", text, re.MULTILINE)


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_commands_and_files_that_are_named_are_there(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    actions = make_parser()._actions
    commands = next(a.choices for a in actions if isinstance(a, argparse._SubParsersAction))
    for code in code_of(page):
        if found := re.match(r"make ([a-z0-9-]+)", code):
            assert found[1] in targets, f"{page.name}: {code}"
        if found := re.match(r"tensorstow ([a-z]+)", code):
            assert found[1] in commands, f"{page.name}: {code}"
        if re.fullmatch(r"(docs|examples|tests|benchmarks|tools|src|csrc|\.ci)/[\w./-]*", code):
            assert (ROOT / code).exists(), f"{page.name}: {code}"
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text("utf-8")):
        assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_commands_that_pages_show_as_blocks_have_options_that_are_there() -> None:
    shown = [
        shlex.split(line, comments=True)[1:]
        for page in PAGES
        for line in re.findall(r"^ {4}(tensorstow .*)", page.read_text("utf-8"), re.MULTILINE)
    ]
    assert len(shown) >= 3
    for words in shown:
        assert make_parser().parse_args(words)


def test_the_release_workflow_is_one_that_can_be_read() -> None:
    """Jobs wait for jobs that are there, and each step does one thing."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text("utf-8"))
    jobs = workflow["jobs"]
    assert [job.get("needs") for job in jobs.values()] == [None, "build", "install"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(("uses" in step) != ("run" in step) for step in steps)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step.get("uses", "a/b@c")) for step in steps)
    assert any("--only-binary :all:" in step.get("run", "") for step in steps)


def test_one_line_examples_of_the_public_classes_can_be_called() -> None:
    """In docstrings, between double backticks: names that exist, keywords that are taken."""
    parameters = [nn.Parameter(torch.ones(3, 3))]
    known: dict[str, Any] = {**vars(tensorstow), "tensorstow": tensorstow, "torch": torch}
    known |= {"partial": partial, "params": parameters, "stow": tensorstow.stow}
    found = []
    for name in tensorstow.__all__:
        text = " ".join((getattr(tensorstow, name).__doc__ or "").split())
        found += re.findall(
            r"``((?:StowedOptimizer|partial|AdamW|Budget|Plan)\([^`.]+.*?\))``", text
        )
    assert len(found) >= 2
    for code in found:
        eval(code.replace(', dir="/nvme/run"', ""), dict(known))  # noqa: S307


def test_each_decision_record_has_a_number_of_its_own() -> None:
    records = sorted((ROOT / "docs/adr").glob("*.md"))
    assert [int(r.name[:4]) for r in records] == list(range(1, len(records) + 1))
    assert all(r.read_text(encoding="utf-8").startswith(f"# {r.name[:4]}: ") for r in records)


def test_a_decision_that_was_amended_says_so() -> None:
    status = {
        record.name[:4]: record.read_text(encoding="utf-8").splitlines()[2]
        for record in (ROOT / "docs/adr").glob("*.md")
    }
    amended = {
        (old, new)
        for new, text in status.items()
        for part in text.split("; ")
        if part.startswith("amends ")
        for old in re.findall(r"\d{4}", part)
    }
    assert amended
    assert all(f"; {new} amends it" in status[old] for old, new in amended)


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/reference/python.md").read_text("utf-8")
    shown = set(re.findall(r"\.\. auto\w+:: (?:[\w.]+\.)?(\w+)", page))
    assert set(tensorstow.__all__) - {"__version__"} <= shown
    assert {"chunked_cross_entropy", "chunk_loss", "TiledLinear"} <= shown


def test_the_comparison_has_what_was_measured_and_nothing_else() -> None:
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "tools/site.py")
    assert spec is not None
    assert spec.loader is not None
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    lines = [line for line in pages.comparison() if line.startswith("| ")]
    rows = [
        row
        for path in sorted((ROOT / "benchmarks/results").glob("*.json"))
        for row in json.loads(path.read_text("utf-8"))["figures"]
        if any(peer in row["name"] for peer in pages.PEERS)
    ]
    measured = [row for row in rows if row["measured"] is not None]
    assert 5 < len(measured) < len(rows)
    figures = [line for line in lines if not line.startswith("| figure")]
    assert [line.split(" | ")[0] for line in figures] == [f"| {row['name']}" for row in measured]
    for line, row in zip(figures, measured, strict=True):
        assert float(line.split(" | ")[2].split()[0]) == pytest.approx(row["measured"], rel=0.01)
