"""A training that may be stopped at any time: it commits, exits, and is started again.

A scheduler sends SIGTERM before it takes a machine, and Slurm SIGUSR1 ten minutes before a time
limit. All ranks then finish their step, commit it and exit with status 75, which says that they are
to be started again: on as many ranks or others. With --bucket, snapshots go there too, for machines
that do not come back. The loop is that of several_ranks.py, next to this file.

    sbatch examples/restart.sbatch --model /shared/llama --dir /shared/run
    python examples/restart.py --tiny    # a toy model on the CPU: stop it with kill -TERM

cluster/ has it for torchrun by hand, Kubernetes' JobSet, Ray Train and SkyPilot.
"""

import argparse

import torch.distributed as dist

import tensorstow
from several_ranks import parse, place, place_among_ranks, sequences, train_step

START_AGAIN = 75
"""The exit status of a run that is to be started again (EX_TEMPFAIL)."""


def main(args: argparse.Namespace) -> None:
    """Train until all steps are taken; after a signal, exit with START_AGAIN."""
    model, optimizer = place(args, stop_signals={"SIGTERM": START_AGAIN, "SIGUSR1": START_AGAIN})
    rows, (rank, ranks) = sequences(args), place_among_ranks()
    try:
        with optimizer:  # commits on all ranks together when the block ends
            for step in range(optimizer.resume() or 0, args.steps):
                loss = train_step(model, optimizer, rows[(step * ranks + rank) % len(rows)])
                if rank == 0:
                    print(f"step {step + 1}: loss {loss:.3f}", flush=True)
                if args.bucket and (step + 1) % args.snapshot_every == 0:
                    keep_in_bucket(optimizer, args, step + 1)
            tensorstow.save_safetensors(model, f"{args.output}/model")
    except SystemExit:
        if ranks > 1:
            dist.barrier()  # Slurm may end the other ranks when the first one exits
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def keep_in_bucket(optimizer: tensorstow.AdamW, args: argparse.Namespace, step: int) -> None:
    """Copy this step to the bucket while training goes on; drop the snapshot before it here."""
    for before in optimizer.snapshots():
        for name in before.names:
            optimizer.drop(name)  # when it is in the bucket
    optimizer.snapshot(f"step-{step}", to=args.bucket)


if __name__ == "__main__":
    main(parse())
