"""The README and the guides: every block of Python runs as printed.

The blocks of ``SCRIPTS`` run in order, in an empty folder, with nothing that the page has not made.
Those of the other pages import what they use. What a reader has before (a model, a batch, the
optimizer of the block above) comes from the prelude below: fresh for every block, the whole of it
for all. Names of places on disk (/nvme, /other-disk) are put below a temporary directory.
"""

import gc
import json
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader

import tensorstow
import trainers
from pages import PAGES, SCRIPTS
from remote import make_remote

pytestmark = [
    # torch's, of a process alone that saves what torch.distributed.checkpoint is also for
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:.pin_memory. argument is set as true"),  # transformers'
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),  # Lightning's
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec"),  # Lightning's
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),  # peft asks it
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set"),  # peft's, of GPT-2's layers
    pytest.mark.usefixtures("kept_environment"),  # Lightning writes a rank's variables
]

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
    if '"base/"' in code:
        trainers.model().save_pretrained(place / "base")
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


def blocks(pages: Iterable[Path]) -> Iterator[Block]:
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            assert match[1] == "python", f"{page.name} has a block of {match[1] or 'no language'}"
            yield Block(page, text[: match.start()].count("\n") + 1, match[2])


@pytest.mark.parametrize("block", list(blocks(p for p in PAGES if p not in SCRIPTS)), ids=str)
def test_a_block_runs_as_printed(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = prelude(tmp_path, block.code)
    if 'update_on="device"' in block.code and not torch.accelerator.is_available():
        make_remote(monkeypatch)  # the CPU stands in
    has_group, on_term = dist.is_initialized(), signal.getsignal(signal.SIGTERM)
    for disk in ("nvme", "other-disk"):
        (tmp_path / disk).mkdir(exist_ok=True)  # mounted, on a reader's machine
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


@pytest.mark.parametrize("page", SCRIPTS, ids=lambda page: page.name)
def test_a_page_runs_from_top_to_bottom_twice(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    on_term, has_group = signal.getsignal(signal.SIGTERM), dist.is_initialized()
    for _ in range(2):  # readers run a script again
        names: dict[str, Any] = {"__name__": "__main__"}
        try:
            for block in blocks([page]):
                exec(compile("\n" * block.line + block.code, str(page), "exec"), names)  # noqa: S102
        finally:
            signal.signal(signal.SIGTERM, on_term)
            names.clear()
            gc.collect()
            if dist.is_initialized() and not has_group:
                dist.destroy_process_group()
