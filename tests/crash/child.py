"""One attempt of a run: a program that takes a job."""

import json
import random
import sys
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


if __name__ == "__main__":
    live(json.loads(sys.argv[1]))
