"""A run of ranks on several hosts: a program that is started once for each rank.

It takes the run's directory and the step to train to, and says what it does, a line each.
"""

import hashlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tensorstow
from tensorstow import Plan
from tensorstow.base.errors import StowError

WIDTH = 48
SECONDS_UNTIL_A_HOST_IS_LOST = 8


def train(directory: Path, last: int) -> None:
    """Resume, train to step ``last``, and tell the weights after each."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    plan = Plan(parameters="disk", states="disk")
    model, optimizer = tensorstow.stow(
        model, tensorstow.AdamW, plan=plan, lr=1e-2, dir=directory, commit_every=1
    )
    start = optimizer.resume() or 0
    _tell("resumed", start)
    for step in range(start + 1, last + 1):
        torch.manual_seed(100 * step + dist.get_rank())
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        _tell("step", step, _digest(model))
    tensorstow.save_safetensors(model, directory.parent / "weights")
    optimizer.close()


def _tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _digest(model: nn.Module) -> str:
    """Return one word for all weights; every rank takes part."""
    text = hashlib.sha256()
    for parameter in model.parameters():
        text.update(parameter.full_tensor().detach().numpy().tobytes())
    return text.hexdigest()[:16]


def main() -> int:
    """Be a rank; say with which error it ended."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS_UNTIL_A_HOST_IS_LOST))
    try:
        train(Path(sys.argv[1]), int(sys.argv[2]))
    except (StowError, RuntimeError) as error:
        _tell(f"{type(error).__name__}: {error}")
        os._exit(1)  # as a group whose other ranks are gone lets nobody end
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
