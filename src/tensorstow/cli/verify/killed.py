"""The run that `verify` kills: ``python -m tensorstow.cli.verify.killed``.

It reports each part of a step as it begins, and trains until it is killed.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from tensorstow.cli.process import teller
from tensorstow.cli.verify.rows import VerifiedRun
from tensorstow.cli.verify.subject import subject_of
from tensorstow.cli.verify.training import train

_ENDLESS = 1_000_000


def main(arguments: list[str] | None = None) -> None:
    """Train with the given arguments."""
    parser = argparse.ArgumentParser(prog="tensorstow.cli.verify.killed", description=__doc__)
    for name in ("directory", "dtype", "format", "device"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model")
    parser.add_argument("--search", nargs="*", default=[], help="directories to import from")
    parser.add_argument("--descriptor", type=int, required=True)
    given = parser.parse_args(arguments)
    sys.path += [place for place in given.search if place and place not in sys.path]
    run = VerifiedRun(given.dtype, "disk", given.format, is_killed=True)
    with os.fdopen(given.descriptor, "w", encoding="utf-8") as pipe:
        progress = teller(pipe)
        device = torch.device(given.device)
        subject = subject_of(given.model)
        train(run, subject, Path(given.directory), device, progress, steps=_ENDLESS)


if __name__ == "__main__":
    main()
