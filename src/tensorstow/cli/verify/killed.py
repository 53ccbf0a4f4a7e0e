"""The run that `verify` kills: ``python -m tensorstow.cli.verify.killed``.

It reports each part of a step when the part begins, and trains until it is killed.
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
    """Train with the arguments of the command line."""
    parser = argparse.ArgumentParser(prog="tensorstow.cli.verify.killed", description=__doc__)
    for name in ("directory", "dtype", "format", "device"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--model")
    parser.add_argument("--search", nargs="*", default=[], help="directories to import from")
    parser.add_argument("--descriptor", type=int, required=True)
    options = parser.parse_args(arguments)
    sys.path += [path for path in options.search if path and path not in sys.path]
    run = VerifiedRun(options.dtype, "disk", options.format, is_killed=True)
    with os.fdopen(options.descriptor, "w", encoding="utf-8") as pipe:
        progress = teller(pipe)
        device = torch.device(options.device)
        subject = subject_of(options.model)
        train(run, subject, Path(options.directory), device, progress, steps=_ENDLESS)


if __name__ == "__main__":
    main()
