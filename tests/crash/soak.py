"""Kill runs at random for as long as it takes: `make soak KILLS=500`."""

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from crash.attempts import random_kill_points, run_killed, undone_moments
from crash.cases import CASES


def main() -> None:
    """Kill as often as was requested; stop at the first run that is not the one never killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    parser.add_argument("--undone", action="store_true", help="only while a step may be undone")
    asked = parser.parse_args()
    cases = [case for case in CASES if undone_moments(case)] if asked.undone else CASES
    torch.set_num_threads(1)
    kills = story_number = 0
    print(f"seed {asked.seed}", flush=True)  # noqa: T201
    while kills < asked.kills:
        case = cases[story_number % len(cases)]
        directory = Path(tempfile.mkdtemp(prefix="tensorstow-soak-", dir=Path.cwd()))
        seed = asked.seed + story_number
        kill_points = random_kill_points(
            seed, 6, undone_moments(case), every=1 if asked.undone else 2
        )
        history = run_killed(case, kill_points, directory)
        kills += history.kills
        story_number += 1
        print(f"{kills} kills; resumed at {history.resumed}", flush=True)  # noqa: T201
        if history.wrong:
            sys.exit(f"{case}, seed {seed}, in {directory}: {history.wrong}")
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
