"""A model of 256 MiB, made on the meta device and trained from disk; prints what memory it took.

It runs where ``children`` has loaded what torch loads late.
Arguments: the bytes for parameters in memory, the step to train to, and for a run that commits a
directory. Such a run goes on from what is there, commits every second step, and at its end by hand.
"""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import tensorstow
from models import ResidualMLP
from tensorstow import Plan
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.report.rss import peak_bytes, resident_bytes, return_freed_memory

WIDTH = 1024
UNITS = 16
UNIT_BYTES = 4 * WIDTH * 4 * WIDTH


def main(budget: int, until: int, *directory: str) -> None:
    """Train."""
    return_freed_memory()
    before = resident_bytes()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is that of now
    with torch.device("meta"):
        model = nn.Sequential(*(ResidualMLP(WIDTH, 2 * WIDTH) for _ in range(UNITS)))
    plan = Plan(
        parameters="disk", states="disk", overlap="backward", prefetch=1, weight_ram_budget=budget
    )
    torch.manual_seed(0)
    kept = {"dir": directory[0], "commit_every": 2} if directory else {}
    make = partial(tensorstow.AdamW, lr=1e-3, **kept)
    model, optimizer = tensorstow.stow(model, make, plan=plan)
    start = (optimizer.resume() or 0) if directory else 0
    losses = []
    for _ in range(start, until):
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if directory:
        optimizer.commit()
    found = parameter_bytes(model)
    ring = optimizer._memory().ring_bytes
    sys.stdout.write(
        json.dumps(
            {
                "grown": (peak_bytes() or 0) - before,
                "pinned": found.most_buffer_pool_bytes,
                "disk": found.disk_bytes,
                "read": found.bytes_read,
                "written": found.bytes_written,
                "ring": ring,
                "losses": losses,
            }
        )
    )
    optimizer.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
