"""A process that has torch loaded and makes one child for each attempt of a run that it is told of.

Loading torch takes longer than the run, and a fork of a process with one thread is as good as new.
"""

import json
import os
import random
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from crash.aims import arm
from crash.world import Case, World


def live(job: dict[str, Any]) -> None:
    """Resume and train to the end, or until killed; leave what the run is then in a file."""
    torch.set_num_threads(1)
    directory = Path(job["directory"])
    if job["moment"]:
        arm(job["moment"], job["count"])
    world = World(Case(**job["case"]), directory / "run")
    if job["slow_us"]:  # a kill then meets writes that are on their way
        engine = world.optimizer._states().engine
        assert engine is not None
        engine.inject_fault("write", times=-1, delay_us=job["slow_us"])
    torch.manual_seed(job["attempt"])  # what is not resumed shall differ
    random.seed(job["attempt"])
    start = world.resume()
    if start is None:
        world.start_afresh()
    with (directory / "losses").open("a", encoding="ascii") as losses:
        losses.write(f"resumed {start}\n")
        losses.flush()

        def tell(step: int, loss: float) -> None:
            losses.write(f"{step} {loss.hex()}\n")
            losses.flush()

        world.train(world.case.steps, tell)
    facts = world.facts()
    world.close()
    (directory / "facts.new").write_text(json.dumps(facts), encoding="ascii")
    (directory / "facts.new").rename(directory / "facts")


def main() -> None:
    """Take jobs as lines; answer with a child's id, and with how it ended."""
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process loads torch's compiler
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                live(json.loads(line))
                status = 0
            except BaseException:  # noqa: BLE001  # the parent shows it
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(child, flush=True)  # noqa: T201
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
