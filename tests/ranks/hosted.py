"""A run of ranks on several hosts: a program that is started once for each rank.

It takes the run's directory, the step to train to and, as JSON, how; it says what it does, a line
each.
"""

import faulthandler
import hashlib
import json
import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import tensorstow
from hosts import CABLE
from tensorstow import Plan
from tensorstow.base.errors import StowError

SECONDS_UNTIL_A_HOST_IS_LOST = 8


@dataclass(frozen=True)
class How:
    """A way of training."""

    width: int = 48
    dtype: str = "float32"
    stage: int = 3
    replicas: int = 1
    accumulation_steps: int = 1
    which: str | None = None
    """The snapshot to resume; None: the newest commit."""
    snapshot: str | None = None
    """The name of a snapshot that is made at the end."""
    silent: bool = False
    """Whether nothing is committed, and the bytes sent over the cable are told, not weights."""


def train(directory: Path, last: int, how: How) -> None:
    """Resume, train to step ``last``, and tell the weights after each."""
    torch.manual_seed(1)
    dtype: torch.dtype = getattr(torch, how.dtype)
    model = nn.Sequential(*(nn.Linear(how.width, how.width) for _ in range(3))).to(dtype)
    where = "disk" if how.stage == 3 else "host"
    micro = how.accumulation_steps
    plan = Plan(
        parameters=where,
        states="disk",
        stage=how.stage,
        replicas=how.replicas,
        accumulation_steps=micro,
    )
    durable = {} if how.silent else {"dir": directory, "commit_every": 1}
    model, optimizer = tensorstow.stow(
        model, tensorstow.AdamW, plan=plan, units=list(model), lr=1e-2, **durable
    )
    start = 0 if how.silent else optimizer.resume(how.which) or 0
    _tell("resumed", start)
    for step in range(start + 1, last + 1):
        torch.manual_seed(100 * step + dist.get_rank())
        for _ in range(micro):
            model(torch.randn(4, how.width, dtype=dtype)).square().mean().backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        _tell("step", step, _sent_by_all() if how.silent else _digest(model))
    if not how.silent:
        tensorstow.save_safetensors(model, directory.parent / "weights")
    if how.snapshot is not None:
        optimizer.snapshot(how.snapshot)
    optimizer.close()


def _tell(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def _sent_by_all() -> int:
    """Return ``_sent`` of a moment when no rank sends, which none goes on before."""
    dist.barrier()
    sent = _sent()
    dist.barrier()
    return sent


def _sent() -> int:
    """Return the bytes that this host has sent, with the headers of packets."""
    lines = Path("/proc/self/net/dev").read_text(encoding="ascii").splitlines()
    (counts,) = [line.split() for line in lines if line.strip().startswith(f"{CABLE}:")]
    return int(counts[9])


def _digest(model: nn.Module) -> str:
    """Return one word for all weights; every rank takes part."""
    text = hashlib.sha256()
    for parameter in model.parameters():
        text.update(parameter.full_tensor().detach().numpy().tobytes())
    return text.hexdigest()[:16]


def main() -> int:
    """Be a rank; say with which error it ended."""
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(70, exit=True)  # says where a rank hangs
    dist.init_process_group("gloo", timeout=timedelta(seconds=SECONDS_UNTIL_A_HOST_IS_LOST))
    try:
        train(Path(sys.argv[1]), int(sys.argv[2]), How(**json.loads("".join(sys.argv[3:]) or "{}")))
    except (StowError, RuntimeError) as error:
        _tell(f"{type(error).__name__}: {error}")
        os._exit(1)  # as a group whose other ranks are gone lets nobody end
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
