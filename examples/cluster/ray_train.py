"""Trains by Ray Train, whose workers have met before the training function begins.

`stow()` and the optimizers take part in the process group that Ray has made. When a worker is lost,
Ray starts all workers again, and they go on from the last commit. You need
``pip install .[trainers] "ray[train]"``, and a folder that all machines see:

    python examples/cluster/ray_train.py --model /shared/llama --dir /shared/run
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # several_ranks.py

from several_ranks import main as train
from several_ranks import parse

WORKERS = 8


def main(args: argparse.Namespace) -> None:
    """Train on WORKERS GPUs of the cluster, or as many CPUs with --tiny."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: PLC0415  # when it is run
    from ray.train.torch import TorchTrainer  # noqa: PLC0415

    trainer = TorchTrainer(
        lambda _: train(args),
        train_loop_config={},
        scaling_config=ScalingConfig(num_workers=WORKERS, use_gpu=not args.tiny),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    )
    trainer.fit()


if __name__ == "__main__":
    main(parse())
