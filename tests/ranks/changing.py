"""A run whose number of ranks changes from life to life, in any of which a rank may be killed.

A program like ``kill_points``: it takes a job for each rank, and prints how each ended.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crash.aims import MOMENTS, arm_at
from ranks.durable import DurableRun, digest
from ranks.kill_points import attend
from ranks.resharded import whole_facts
from tensorstow.checkpoint import worlds

CHANGES: dict[str, tuple[Any, str, str]] = {
    **{
        name: MOMENTS[name]
        for name in (
            "a new store",
            "resuming begins",
            "a tensor of a commit written",
            "before the sync of files",
            "between sync and transaction",
            "rows written, not committed",
            "behind the transaction",
            "weights half loaded",
        )
    },
    "the stores are seen": (worlds, "_listed", "after"),
    "an old store goes": (worlds, "remove", "before"),
    "an old store is gone": (worlds, "remove", "after"),
    "half of an old store is gone": (Path, "unlink", "after"),
}


def train_rank(job: dict[str, Any]) -> None:
    """Be a rank: resume and take steps, or be killed; leave what the run is at each step."""
    torch.set_num_threads(1)
    rank, world = job["rank"], job["world"]
    store = dist.FileStore(job["meeting"], world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    with _armed(job):
        run = DurableRun(Path(job["directory"]) / "run", commit_every=1)
        start = run.resume() or 0
    with Path(job["directory"], f"told-{rank}").open("a", encoding="ascii") as told:
        facts = whole_facts(run.model, run.optimizer)
        print("resumed", start, _print(facts), file=told, flush=True)
        for step in range(start + 1, start + 3):
            run.train(step)
            print(
                "step", step, _print(whole_facts(run.model, run.optimizer)), file=told, flush=True
            )
    run.optimizer.close()
    dist.destroy_process_group()


@contextmanager
def _armed(job: dict[str, Any]) -> Iterator[None]:
    """Die in the block, if at all: steps that are taken after it are all told of."""
    if not job["moment"]:
        yield
        return
    owner, name, _ = place = CHANGES[job["moment"]]
    before = getattr(owner, name)
    arm_at(place, job["count"])
    yield
    setattr(owner, name, before)


def _print(facts: dict[str, str]) -> str:
    """Return one word for the weights and states, without what each rank has of its own."""
    shared = {name: value for name, value in facts.items() if not name.startswith("1.running")}
    text = json.dumps(shared, sort_keys=True).encode()
    return digest(torch.frombuffer(bytearray(text), dtype=torch.uint8)).split()[-1]


if __name__ == "__main__":
    print(json.dumps(attend(json.loads(sys.argv[1]), train_rank)))  # noqa: T201
