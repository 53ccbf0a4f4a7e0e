"""What a rank of torchrun has of a machine, and the bits that it trains."""

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tensorstow import AdamW, PipelinePolicy
from tensorstow.base import nodes
from tensorstow.io.engine import open_engine
from tensorstow.io.numa_binding import bind_threads


def make_weights() -> list[torch.Tensor]:
    """Return some weights, the same each time."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(300, 70), (4099,), (64, 64)]
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


def train(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor]) -> None:
    """Take three steps with gradients that are the same each time."""
    generator = torch.Generator().manual_seed(6)
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def digest(weights: list[torch.Tensor]) -> str:
    """Return what tells other bits apart."""
    return hashlib.sha256(b"".join(w.detach().numpy().tobytes() for w in weights)).hexdigest()


class Started:
    """Threads that have started in this process since, but for the interpreter's."""

    def __init__(self) -> None:
        """Begin now."""
        self._before = _threads()

    def come_to(self, cores: set[int], count: int, seconds: float = 10.0) -> bool:
        """Return whether there are ``count`` of them, and all come to run on ``cores`` only.

        Each moves itself, when it first runs.
        """
        end = time.monotonic() + seconds
        while (found := self.cores()) != [cores] * count and time.monotonic() < end:
            time.sleep(0.001)
        return found == [cores] * count

    def cores(self) -> list[set[int]]:
        """Return where each of them may run."""
        return [os.sched_getaffinity(task) for task in _threads() - self._before]


def main(topology: Path, out: Path) -> None:
    """Train as one of several ranks, on nodes that are made up; write what was found."""
    nodes._NODES = topology
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    started = Started()
    weights = make_weights()
    policy = PipelinePolicy(chunk_elements=4096, backend="threads", threads=2)
    directory = out / str(rank)
    directory.mkdir()
    optimizer = AdamW(
        weights, lr=1e-2, states="disk", dir=directory, durability="none", policy=policy
    )
    train(optimizer, weights)
    share = bind_threads()
    told = {
        # The scheduler, the I/O engine's 8, and one beside the scheduler.
        "are_native_bound": started.come_to(set(share.cores), 10),
        "threads": share.threads,
        "cores": share.cores,
        "nodes": share.nodes,
        "depth": open_engine().depth,
        "caller": sorted(os.sched_getaffinity(0)),
        "weights": digest(weights),
    }
    (out / f"rank{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    optimizer.close()
    dist.destroy_process_group()


def _threads() -> set[int]:
    tasks = {int(task.name) for task in Path("/proc/self/task").iterdir()}
    return tasks - {thread.native_id for thread in threading.enumerate()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
