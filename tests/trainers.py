"""What every trainer is tested with: a tiny language model, its batches, and the plain loop."""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.distributed.tensor import DTensor

from tensorstow import AdamW, PipelinePolicy

WORDS, LENGTH, BATCH = 32, 8, 2
LEARNING_RATE = 1e-2
OF_A_TRAINER: dict[str, Any] = {
    "use_cpu": True,
    "train_sampling_strategy": "sequential",
    "per_device_train_batch_size": BATCH,
    "learning_rate": LEARNING_RATE,
    "weight_decay": 0.1,
    "num_train_epochs": 1,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
"""Arguments of transformers' Trainer, with which it does what ``plain_loop`` does."""
EACH_STEP = {"save_strategy": "steps", "save_steps": 1}
SMALL = PipelinePolicy(chunk_elements=1024, depth=2)
MOMENTS_OF_RANKS = pytest.mark.parametrize(
    ("moment", "rank"),
    [
        ("forward", 0),
        ("backward", 1),
        ("step", 0),
        *(
            pytest.param(moment, rank, marks=pytest.mark.soak)
            for moment, rank in (("forward", 1), ("backward", 0), ("step", 1))
        ),
    ],
)
"""When a signal comes, and to which of two ranks."""


def model() -> Any:  # noqa: ANN401  # another library's
    """Return a GPT-2 with random weights, made without network; tied weights, no dropout."""
    from transformers import AutoModelForCausalLM, GPT2Config  # noqa: PLC0415  # seconds

    torch.manual_seed(0)
    quiet = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 16}
    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(**words, **sizes, **quiet)
    made = AutoModelForCausalLM.from_config(config)
    made.loss_type = "ForCausalLM"  # GPT-2's class name says none, and labels are counted by it
    return made


def adapted(**options: Any) -> Any:  # noqa: ANN401
    """Return the model with adapters of peft."""
    import peft  # noqa: PLC0415  # seconds

    net = model()
    torch.manual_seed(3)
    kinds = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(net, peft.LoraConfig(r=2, lora_dropout=0.0, **kinds, **options))


def arguments(place: Path, **given: Any) -> Any:  # noqa: ANN401
    """Return arguments of transformers' Trainer."""
    import transformers  # noqa: PLC0415  # seconds

    return transformers.TrainingArguments(str(place / "out"), **{**OF_A_TRAINER, **given})


def examples(batches: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(
        WORDS, (batches * BATCH, LENGTH), generator=torch.Generator().manual_seed(1)
    )
    return [{"input_ids": row, "labels": row} for row in tokens]


def micro_batches(batches: int) -> list[torch.Tensor]:
    """Return the same in batches, in order."""
    rows = examples(batches)
    return [
        torch.stack([row["input_ids"] for row in rows[i : i + BATCH]])
        for i in range(0, len(rows), BATCH)
    ]


def windows(batches: int, accumulation: int) -> list[list[torch.Tensor]]:
    """Return the micro-batches of each step; the last step may have fewer."""
    found = micro_batches(batches)
    return [found[i : i + accumulation] for i in range(0, len(found), accumulation)]


def bits(net: nn.Module) -> list[bytes]:
    return [t.detach().numpy().tobytes() for t in net.state_dict().values()]


def plain_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Return one group of matrices that decay, and one of what does not."""
    named = list(net.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim != 2], "weight_decay": 0.0},
    ]


def by_hand(
    net: nn.Module,
    steps: Sequence[Any],
    losses: Callable[[Any, Any], Iterable[torch.Tensor]],
    *,
    clip: float | None = 1.0,
    inside: bool = False,
    total: int | None = None,
) -> list[bytes]:
    """Train with states in RAM and return the weights; ``losses`` are of a step's micro-batches.

    ``inside``: gradients are clipped inside the update, by the optimizer. ``total``: the steps in
    which the learning rate falls to 0; None: it stays.
    """
    optimizer = AdamW(plain_groups(net), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda n: 1.0 if total is None else max(0.0, (total - n) / max(1, total))
    )
    for window in steps:
        for loss in losses(net, window):
            loss.backward()
        if clip is not None and inside:
            optimizer.clip_grad_norm_(clip)
        elif clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return bits(net)


def plain_loop(
    steps: Sequence[Sequence[torch.Tensor]],
    *,
    clip: float | None = 1.0,
    total: int | None = None,
    inside: bool = False,
) -> list[bytes]:
    """Train by hand as transformers' Trainer does; the rate falls to 0 in ``total`` steps."""

    def losses(net: Any, window: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:  # noqa: ANN401
        items = torch.tensor(sum(batch[:, 1:].numel() for batch in window))
        for batch in window:
            yield net(input_ids=batch, labels=batch, num_items_in_batch=items).loss

    total = len(steps) if total is None else total
    return by_hand(model(), steps, losses, clip=clip, inside=inside, total=total)


def mean_loop(
    batches: int,
    accumulation: int = 1,
    *,
    clip: float | None = None,
    inside: bool = True,
    epochs: int = 1,
    net: Any = None,  # noqa: ANN401
) -> list[bytes]:
    """Train by hand; each loss is divided by the micro-batches of a whole step."""

    def losses(net: Any, window: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:  # noqa: ANN401
        for batch in window:
            yield net(input_ids=batch, labels=batch).loss / accumulation

    net = (model() if net is None else net).train()
    steps = windows(batches, accumulation) * epochs
    return by_hand(net, steps, losses, clip=clip, inside=inside)


def finish(made: Any) -> list[bytes]:  # noqa: ANN401
    """Return the weights of a Trainer whose optimizer alone is ours, and close that."""
    optimizer = made.optimizer.optimizer  # accelerate's wrapper holds it
    optimizer.commit() if optimizer.placement_of_states == "shared" else optimizer.wait()
    found = bits(made.model)
    optimizer.close()
    return found


def forget_state() -> None:
    """Drop what accelerate has one of in a process."""
    from accelerate.state import (  # noqa: PLC0415  # seconds
        AcceleratorState,
        GradientState,
        PartialState,
    )

    for kind in (AcceleratorState, GradientState, PartialState):
        kind._reset_state()


@contextmanager
def environment_of_two(rank: int) -> Iterator[None]:
    """Set what a launcher tells one of two ranks, whose process group is there."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "NODE_RANK": 0}  # unused
        where |= {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, **where}.items():
            patch.setenv(name, str(value))
        yield


@contextmanager
def one_of_two(rank: int) -> Iterator[None]:
    """Let Trainers of transformers be those of two ranks, whose process group is there."""
    gc.freeze()  # what is imported: trainers call the collector
    with environment_of_two(rank):
        forget_state()
        yield
        forget_state()


def whole(made: Any) -> list[bytes]:  # noqa: ANN401
    """Return the weights of a ``Stowed`` trainer on each rank, and close its optimizer."""
    optimizer = made._optimizer()
    optimizer.wait()
    values = made.model.state_dict().values()
    tensors = [t.full_tensor() if isinstance(t, DTensor) else t for t in values]
    optimizer.close()
    return [t.numpy().tobytes() for t in tensors]


def yaml_of_guide(heading: str, place: Path) -> dict[str, Any]:
    """Return the first indented block below a heading of docs/guides/trainers.md."""
    page = Path(__file__).parents[1] / "docs/guides/trainers.md"
    text = page.read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    "))
    block = takewhile(lambda line: line.startswith("    "), lines[start:])
    found: dict[str, Any] = yaml.safe_load(dedent("\n".join(block)).replace("/nvme", str(place)))
    return found


def nbytes_beside_weights(folder: Path) -> int:
    """Return the bytes of a checkpoint folder without the weights."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    return sum(path.stat().st_size for path in files if path.suffix != ".safetensors")
