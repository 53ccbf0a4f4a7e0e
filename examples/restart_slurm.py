"""A training that Slurm may stop at any time: it commits, exits, and is started again.

restart.sbatch starts this script as one task for each GPU. Slurm sends SIGUSR1 ten minutes before
the time limit, and SIGTERM before a preemption. All ranks then finish their step, commit it and
exit with status 75. The job goes back to the queue and continues from that commit, on as many
ranks. The loop is that of several_ranks.py, next to this file. Every node must see --dir.

    sbatch examples/restart.sbatch --model /shared/llama --dir /shared/run
    python examples/restart_slurm.py --tiny    # a toy model on the CPU: stop it with kill -TERM
"""

import argparse
import signal
import sys

import torch
import torch.distributed as dist

import tensorstow
from several_ranks import parse, place, sequences, train_step

START_AGAIN = 75
"""The exit status that restart.sbatch waits for (EX_TEMPFAIL)."""


def main(args: argparse.Namespace) -> int:
    """Train until all steps are taken or a signal arrives; return the exit status."""
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda received, _: signals.append(received))
    model, optimizer = place(args)
    rows, rank, ranks = sequences(args), dist.get_rank(), dist.get_world_size()
    stop = torch.zeros(1)
    with optimizer:  # commits on all ranks together when the block ends
        for step in range(optimizer.resume() or 0, args.steps):
            loss = train_step(model, optimizer, rows[(step * ranks + rank) % len(rows)])
            if rank == 0:
                print(f"step {step + 1}: loss {loss:.3f}", flush=True)
            stop.fill_(len(signals))
            dist.all_reduce(stop)  # a signal may reach the ranks in different steps
            if stop:
                break
        else:
            tensorstow.save_safetensors(model, f"{args.output}/model")
    dist.barrier()  # Slurm may end the other ranks when the first one exits
    dist.destroy_process_group()
    return START_AGAIN if stop else 0


if __name__ == "__main__":
    sys.exit(main(parse()))
