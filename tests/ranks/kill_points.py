"""A run of two ranks, one of which is killed: a program that takes a job for each rank.

It forks a child for each, kills one after a delay, ends the others when one has died, and prints
how each ended.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crash.aims import MOMENTS, arm_at
from ranks.durable import DurableRun
from tensorstow.checkpoint import agreement
from tensorstow.checkpoint.coordinator import Coordinator
from tensorstow.store.store import Store

WORLD = 2
_PATIENCE_SECONDS = 30.0

RANK_MOMENTS: dict[str, tuple[Any, str, str]] = {
    **{
        name: MOMENTS[name]
        for name in (
            "a new store",
            "a tensor of a commit written",
            "before the sync of files",
            "between sync and transaction",
            "rows written, not committed",
            "behind the transaction",
            "chunks have new extents",
            "weights half loaded",
            "behind a pin",
            "behind a drop",
            "a step handed over",
        )
    },
    "its word is left": (Coordinator, "_post", "after"),
    "all have it and none is dropped": (Store, "drop_older", "before"),
    "the one before is dropped": (Store, "drop_older", "after"),
    "its generations are told": (agreement, "_everyones", "after"),
}


@dataclass(frozen=True)
class KillPoint:
    """When a rank is killed, if the run has not come to its end before."""

    rank: int = 0
    delay: float | None = None
    """Seconds after it has resumed."""
    moment: str = ""
    """One of RANK_MOMENTS, the ``count``-th time."""
    count: int = 1
    grace: float = 0.0
    """Seconds that the other one has then."""


@dataclass(frozen=True)
class Case:
    """How the run commits."""

    commit_every: int = 1
    overlap: str = "none"
    pin_every: int = 0
    steps: int = 9


def train_rank(job: dict[str, Any]) -> None:
    """Be a rank: resume and train to the end, or until killed; leave what the run is then."""
    torch.set_num_threads(1)
    rank, directory = job["rank"], Path(job["directory"])
    store = dist.FileStore(job["meeting"], WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    if job["moment"]:
        arm_at(RANK_MOMENTS[job["moment"]], job["count"])
    case = Case(**job["case"])
    place = directory / "run" if job["durable"] else None
    run = DurableRun(place, commit_every=case.commit_every, overlap=case.overlap)
    with (directory / f"told-{rank}").open("a", encoding="ascii") as told:
        if place is not None:
            print("resumed", run.resume(), file=told, flush=True)
        while run.step < case.steps:
            run.train(run.step + 1)
            print("step", run.step, file=told, flush=True)
            if case.pin_every and place is not None and run.step % case.pin_every == 0:
                _pin(run)
    facts = run.facts()
    run.optimizer.close()
    (directory / f"facts-{rank}").write_text(json.dumps(facts), encoding="ascii")
    dist.destroy_process_group()


def _pin(run: DurableRun) -> None:
    """Keep this step, and no longer the one before."""
    if run.optimizer.snapshots():
        run.optimizer.drop("last")
    run.optimizer.snapshot("last")


def attend(
    jobs: list[dict[str, Any]], train: Callable[[dict[str, Any]], None] = train_rank
) -> list[int]:
    """Return the exit status of a child for each job, which ``train`` does."""
    children = {_born(job, train): job for job in jobs}
    statuses: dict[int, int] = {}
    began: dict[int, float] = {}
    end = time.monotonic() + _PATIENCE_SECONDS
    while children.keys() - statuses.keys():
        now = time.monotonic()
        for child in children.keys() - statuses.keys():
            if _has_resumed(children[child]):
                began.setdefault(child, now)
            delay = children[child]["delay"]
            if now > end or (delay is not None and now - began.get(child, now) > delay):
                os.kill(child, signal.SIGKILL)
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                statuses[child] = os.waitstatus_to_exitcode(status)
                if statuses[child] != 0:
                    end = min(end, time.monotonic() + jobs[0]["grace"])
        time.sleep(0.001)
    return [statuses[child] for child in children]


def _has_resumed(job: dict[str, Any]) -> bool:
    told = Path(job["directory"], f"told-{job['rank']}")
    return told.exists() and told.stat().st_size > 0


def _born(job: dict[str, Any], train: Callable[[dict[str, Any]], None]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            train(job)
            status = 0
        except BaseException:  # noqa: BLE001  # the parent shows it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def jobs_of(
    case: Case, kill_point: KillPoint, directory: Path, attempt: int
) -> list[dict[str, Any]]:
    """Return what each rank is to do; without a directory's ``run`` for attempt -1."""
    common = {
        "case": asdict(case),
        "directory": str(directory),
        "meeting": str(directory / f"meeting-{attempt}"),
        "durable": attempt >= 0,
        "grace": kill_point.grace,
    }
    nothing = {"moment": "", "count": 0, "delay": None}
    own = {"moment": kill_point.moment, "count": kill_point.count, "delay": kill_point.delay}
    return [
        {**common, "rank": rank, **(own if rank == kill_point.rank else nothing)}
        for rank in range(WORLD)
    ]


if __name__ == "__main__":
    print(json.dumps(attend(json.loads(sys.argv[1]))))  # noqa: T201
