"""A run of several ranks, one of which gets a signal: what tests call in each of them."""

import os
import signal
from pathlib import Path

import torch.distributed as dist

from ranks.durable import DurableRun


def until_stopped(directory: Path, rank: int, *, by_hand: bool) -> tuple[object, int, int | None]:
    """Train until a signal to ``rank`` stops the run; return its status and both steps.

    ``by_hand``: all ranks commit between the signal and the next step.
    """
    run = DurableRun(directory, commit_every=None, stop_signals={"SIGUSR1": 75})
    taken, status = 0, None
    try:
        with run.optimizer:
            for step in range(1, 20):
                if step == 3 and dist.get_rank() == rank:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if step == 3 and by_hand:
                    run.optimizer.commit()
                taken = step
                run.train(step)
    except SystemExit as ended:
        status = ended.code
    dist.barrier()
    again = DurableRun(directory, commit_every=None)
    resumed = again.resume()
    again.optimizer.close()
    return status, taken, resumed
