"""A model of 256 MiB, made on the meta device and trained from disk; prints what memory it took.

Arguments: the bytes for parameters in memory, the step to train to, and for a run that commits a
directory. Such a run goes on from what is there, commits every second step, and at its end by hand.
"""

import json
import sys
from functools import partial
from pathlib import Path

from torch import nn

import tensorstow
from models import ResidualMLP
from tensorstow import Plan
from tensorstow.fsdp.report import parameter_bytes

WIDTH = 1024
UNITS = 16
UNIT_BYTES = 4 * WIDTH * 4 * WIDTH


def most_resident() -> int:
    """Return the most memory that this process ever held, in bytes."""
    with Path("/proc/self/status").open(encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def main(budget: int, until: int, *directory: str) -> None:
    """Train."""
    # Before memory is measured: what torch loads late.
    import torch._dynamo  # noqa: PLC0415
    import torch.distributed.fsdp  # noqa: PLC0415

    before = most_resident()
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
                "grown": most_resident() - before,
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
