"""A model of 256 MiB, made on the meta device and trained from disk; prints what memory it took."""

import json
import sys
from functools import partial
from pathlib import Path

import torch
from torch import nn

import tensorstow
from tensorstow import Plan
from tensorstow.engine.report import parameter_bytes

WIDTH = 1024
UNITS = 16
UNIT_BYTES = 4 * WIDTH * 4 * WIDTH


class Block(nn.Module):
    """A block of 16 MiB."""

    def __init__(self) -> None:
        """Make two layers."""
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the stream."""
        return x + self.down(torch.tanh(self.up(x)))


def most_resident() -> int:
    """Return the most memory that this process ever held, in bytes."""
    with Path("/proc/self/status").open(encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def main() -> None:
    """Train for three steps."""
    import torch.distributed.fsdp  # noqa: PLC0415  # before memory is measured

    before = most_resident()
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(UNITS)))
    plan = Plan(
        parameters="disk",
        states="disk",
        overlap="backward",
        prefetch=1,
        shelf_bytes=int(sys.argv[1]),
    )
    model, optimizer = tensorstow.stow(model, partial(tensorstow.AdamW, lr=1e-3), plan=plan)
    losses = []
    for _ in range(3):
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    found = parameter_bytes(model)
    ring = optimizer.memory().ring_bytes
    sys.stdout.write(
        json.dumps(
            {
                "grown": most_resident() - before,
                "lent": found.most_lent_bytes,
                "disk": found.disk_bytes,
                "read": found.bytes_read,
                "written": found.bytes_written,
                "ring": ring,
                "losses": losses,
            }
        )
    )


if __name__ == "__main__":
    main()
