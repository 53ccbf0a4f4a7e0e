"""A run of two ranks, one of which is killed: a process that has torch loaded makes their lives.

It takes lives as lines: a job for each rank. It forks a child for each, kills one where a delay
says so, ends the others when one has died, and answers with how each ended.
"""

import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crash.aims import MOMENTS, arm_at
from ranks.durable import Life
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
    "its word is left": (Coordinator, "_say", "after"),
    "all have it and none is dropped": (Store, "drop_older", "before"),
    "the one before is dropped": (Store, "drop_older", "after"),
    "its generations are told": (agreement, "_everyones", "after"),
}


@dataclass(frozen=True)
class Death:
    """How a rank ends, if the run does not come to its end before."""

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


def live(job: dict[str, Any]) -> None:
    """Be a rank: resume and train to the end, or until killed; leave what the run is then."""
    torch.set_num_threads(1)
    rank, directory = job["rank"], Path(job["directory"])
    store = dist.FileStore(job["meeting"], WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    if job["moment"]:
        arm_at(RANK_MOMENTS[job["moment"]], job["count"])
    case = Case(**job["case"])
    place = directory / "run" if job["durable"] else None
    life = Life(place, commit_every=case.commit_every, overlap=case.overlap)
    with (directory / f"told-{rank}").open("a", encoding="ascii") as told:
        if place is not None:
            print("resumed", life.resume(), file=told, flush=True)
        while life.step < case.steps:
            life.train(life.step + 1)
            print("step", life.step, file=told, flush=True)
            if case.pin_every and place is not None and life.step % case.pin_every == 0:
                _pin(life)
    facts = life.facts()
    life.optimizer.close()
    (directory / f"facts-{rank}").write_text(json.dumps(facts), encoding="ascii")
    dist.destroy_process_group()


def _pin(life: Life) -> None:
    """Keep this step, and no longer the one before."""
    if life.optimizer.snapshots():
        life.optimizer.drop("last")
    life.optimizer.snapshot("last")


def attend(jobs: list[dict[str, Any]]) -> list[int]:
    """Return the exit status of a child for each job."""
    children = {_born(job): job for job in jobs}
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


def _born(job: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            live(job)
            status = 0
        except BaseException:  # noqa: BLE001  # the parent shows it
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def jobs_of(case: Case, death: Death, directory: Path, life: int) -> list[dict[str, Any]]:
    """Return what each rank is to do; without a directory's ``run`` for life -1."""
    common = {
        "case": asdict(case),
        "directory": str(directory),
        "meeting": str(directory / f"meeting-{life}"),
        "durable": life >= 0,
        "grace": death.grace,
    }
    nothing = {"moment": "", "count": 0, "delay": None}
    own = {"moment": death.moment, "count": death.count, "delay": death.delay}
    return [
        {**common, "rank": rank, **(own if rank == death.rank else nothing)}
        for rank in range(WORLD)
    ]


def main() -> None:
    """Take lives as lines."""
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads torch's compiler
    for line in sys.stdin:
        print(json.dumps(attend(json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
