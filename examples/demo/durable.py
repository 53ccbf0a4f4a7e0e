"""The run that is killed and resumed: ``python -m demo.durable``.

It trains like the rows, in a run's directory: it resumes from the last commit, commits after the
steps in its arguments, and prints a hash of the parameters after the last step. It reports progress
like ``worker``.
"""

import argparse
import json
import os

import torch

import tensorstow
from demo.configurations import FULL, SMALL
from demo.training import LEARNING_RATE, Clock, Training, make_model
from demo.worker import add_arguments
from tensorstow.cli.digests import checksum
from tensorstow.cli.process import say, teller
from tensorstow.io.local_share import usable_cores
from tensorstow.states.policy import PipelinePolicy


def main(arguments: list[str] | None = None) -> None:
    """Train up to the step that the arguments name."""
    parser = argparse.ArgumentParser(prog="demo.durable", description=__doc__)
    parser.add_argument("--until", type=int, required=True, help="the last step")
    parser.add_argument("--commits", type=int, nargs="*", default=[], help="after these steps")
    add_arguments(parser)
    options = parser.parse_args(arguments)
    scale = SMALL if options.small else FULL
    torch.set_num_threads(usable_cores())
    with os.fdopen(options.descriptor, "w", encoding="utf-8") as pipe:
        progress = teller(pipe)
        progress(-1, "build")
        model = make_model(scale)
        optimizer = tensorstow.AdamW(
            model.parameters(),
            lr=LEARNING_RATE,
            weight_decay=0.0,
            states="disk",
            dir=options.directory,
            module=model,
            commit_every=None,
            policy=PipelinePolicy(chunk_elements=scale.chunk_elements),
        )
        training = Training(model, optimizer, scale, Clock(progress))
        start = optimizer.resume() or 0
        if start:
            training.go_on(start, optimizer.extra)
        for step in range(start, options.until):
            training.take(1)
            if step + 1 in options.commits:
                progress(step, "commit")
                optimizer.commit(training.kept())
        optimizer.synchronize()
        say(pipe, json.dumps({"start": start, "checksum": checksum(model)}))


if __name__ == "__main__":
    main()
