"""Models without an optimizer, on every rank."""

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tensorstow
import tensorstow.deepspeed as deepspeed
from models import ResidualStack
from ranks.stowed import model_of
from tensorstow import Plan
from tensorstow.base.errors import StowError
from tensorstow.deepspeed import evaluation
from tensorstow.deepspeed.checkpoint import sharded

TOKENS = torch.arange(6).reshape(2, 3) % 5


def logits_of_evaluation(config: dict[str, object], folder: str) -> tuple[bool, list[str]]:
    """Return whether an engine computes what rank 0's model does, and what is left in a folder."""
    model = model_of(torch.float32)
    want = model_of(torch.float32)(TOKENS).detach()
    if dist.is_initialized() and dist.get_rank() > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, config=config)
    assert optimizer is None
    engine.eval()
    with torch.no_grad():
        got = [engine(TOKENS) for _ in range(2)]
    engine.destroy()
    same = all(torch.equal(each, want) for each in got)
    return same, [str(file) for file in Path(folder).rglob("*")]


def error_where_the_disk_is_full(config: dict[str, object], folder: str) -> str:
    """Return what is raised where rank 0 cannot write the weights, or a checkpoint's last file."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def save() -> None:
        engine, *_ = deepspeed.initialize(model=model_of(torch.float32), config=config)
        engine.save_checkpoint(folder)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(evaluation, "save_file", full)
            patch.setattr(sharded, "write_tag", full)
        with pytest.raises((OSError, StowError)) as caught:
            save()
    return f"{type(caught.value).__name__}: {caught.value}"


def errors_of_one_rank(folder: str) -> list[str]:
    """Return what is raised where rank 1 cannot keep its client_state, and rank 0 cannot write."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    engine, *_ = deepspeed.initialize(model=model_of(torch.float32), config=config)
    odd = {"object": object()} if dist.get_rank() == 1 else {}
    (Path(folder) / "file").touch()
    told = []
    with pytest.raises((TypeError, StowError)) as caught:
        engine.save_checkpoint(f"{folder}/checkpoint", client_state=odd)
    told.append(f"{type(caught.value).__name__}: {caught.value}")
    with pytest.raises((OSError, StowError)) as failed:
        engine.save_16bit_model(f"{folder}/file")
    told.append(f"{type(failed.value).__name__}: {failed.value}")
    return told


def outputs_from_files(
    folder: str, tier: str, width: int, blocks: int, x: torch.Tensor
) -> list[torch.Tensor]:
    """Return what a stack that is only read computes in two forwards."""
    with torch.device("meta"):
        model = ResidualStack(width, blocks)
    model, _ = tensorstow.stow(model, None, plan=Plan(parameters=tier), weights=folder)
    return [model(x) for _ in range(2)]
