"""A training that Slurm may stop at any time: it commits, exits, and is started again.

restart.sbatch starts this script as one task for each GPU. Slurm sends SIGUSR1 ten minutes before
the time limit, and SIGTERM before a preemption. All ranks then finish their step, commit it and
exit with status 75. The job goes back to the queue and continues from that commit, on as many
ranks or others. The loop is that of several_ranks.py, next to this file. Every node must see --dir.

    sbatch examples/restart.sbatch --model /shared/llama --dir /shared/run
    python examples/restart_slurm.py --tiny    # a toy model on the CPU: stop it with kill -TERM
"""

import argparse

import torch.distributed as dist

import tensorstow
from several_ranks import parse, place, sequences, train_step

START_AGAIN = 75
"""The exit status that restart.sbatch waits for (EX_TEMPFAIL)."""


def main(args: argparse.Namespace) -> None:
    """Train until all steps are taken; after a signal, exit with START_AGAIN."""
    model, optimizer = place(args, stop_signals={"SIGTERM": START_AGAIN, "SIGUSR1": START_AGAIN})
    rows, rank, ranks = sequences(args), dist.get_rank(), dist.get_world_size()
    try:
        with optimizer:  # commits on all ranks together when the block ends
            for step in range(optimizer.resume() or 0, args.steps):
                loss = train_step(model, optimizer, rows[(step * ranks + rank) % len(rows)])
                if rank == 0:
                    print(f"step {step + 1}: loss {loss:.3f}", flush=True)
            tensorstow.save_safetensors(model, f"{args.output}/model")
    except SystemExit:
        dist.barrier()  # Slurm may end the other ranks when the first one exits
        raise
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
