"""An optimizer of a run that stops without an end: nothing is committed any more."""

from tensorstow.checkpoint.run import Interval
from tensorstow.optim.stowed_adam import StowedAdam


def stop(optimizer: StowedAdam) -> None:
    """Let everything go as a stop of the process does: what no commit has is lost."""
    optimizer._runtime.commits.every = Interval()
    optimizer.close()
