"""One run on 1, 2, 3, 4 and 8 ranks, and on 1, then 4, 2 and 3 of them with 20 kills: its weights.

Each life is started by torchrun, a process per rank with one thread. A step has 24 micro-batches in
any case, which the ranks take by turns, and is clipped. ``ordered_reduce`` adds their gradients in
order. Beside it the same run without, and what the order costs a step of two ranks.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.measure import Figure, Sample, Settings, exactly, ratio
from tensorstow import AdamW, Plan, stow
from tensorstow.base.tiers import Tier

_MICRO_BATCHES = 24
"""Of a step, over all ranks."""
_STEPS, _QUICK_STEPS = 200, 8
_WORLDS, _QUICK_WORLDS = (1, 2, 3, 4, 8), (1, 2)
_CHAIN, _QUICK_CHAIN = (1, 4, 2, 3), (1, 2)
_KILLS, _QUICK_KILLS = 20, 1
_PLANS = {
    "memory": Plan(stage=1),
    "disk": Plan(parameters=Tier.DISK, states=Tier.DISK, overlap="forward"),
}
"""By turns in the run that is killed."""
_WORDS, _WIDTH, _LAYERS = 512, 64, 4


def figures(settings: Settings) -> Iterator[Figure]:
    """Train in each way, and compare the weights after the last step."""
    steps = _QUICK_STEPS if settings.quick else _STEPS
    worlds = _QUICK_WORLDS if settings.quick else _WORLDS
    with tempfile.TemporaryDirectory(
        dir=settings.scratch(1 << 30), prefix=".tensorstow-bench-"
    ) as directory:
        root = Path(directory)
        several = ", ".join(map(str, worlds))
        in_order, seconds = _weights(root, worlds, steps, "sum")
        yield _distinct(f"weights of {several} ranks after {steps} steps, in order", in_order)
        digest, kills = _chain(root / "chain", steps, quick=settings.quick)
        way = " -> ".join(map(str, _QUICK_CHAIN if settings.quick else _CHAIN))
        name = f"weights of 1 rank, and of {way} with {kills} kills"
        yield _distinct(name, {"1": in_order["1"], way: digest})
        without, plain_seconds = _weights(root, worlds, steps, None)
        figure = _distinct(f"weights of {several} ranks without ordered_reduce", without)
        yield replace(figure, limit=None)
        samples = {"in order": Sample((seconds,)), "without": Sample((plain_seconds,))}
        if not settings.quick:
            samples = _timed(root, settings.pairs)
        yield ratio("a step of two ranks, in order / without", None, samples, "in order", "without")


def _weights(
    root: Path, worlds: Sequence[int], steps: int, order: str | None
) -> tuple[dict[str, str], float]:
    """Return the digests of the weights by the number of ranks, and the last one's seconds."""
    digests, seconds = {}, 0.0
    for ranks in worlds:
        life = _Life(root / f"{order}-{ranks}", ranks, steps, order)
        digests[str(ranks)] = life.run()
        seconds = life.seconds_per_step
    return digests, seconds


def _timed(root: Path, pairs: int) -> dict[str, Sample]:
    seconds: dict[str, list[float]] = {"in order": [], "without": []}
    for turn in range(pairs):
        for way, order in (("in order", "sum"), ("without", None)):
            life = _Life(root / f"timed-{turn}-{order}", 2, 20, order)
            life.run()
            seconds[way].append(life.seconds_per_step)
    return {way: Sample(tuple(each)) for way, each in seconds.items()}


def _distinct(name: str, digests: dict[str, str]) -> Figure:
    detail = {"sha256": digests}
    return Figure(name, exactly(1), len(set(digests.values())), "different", detail)


def _chain(directory: Path, steps: int, *, quick: bool) -> tuple[str, int]:
    """Train on one number of ranks after the other, killing ranks; return digest and kills."""
    worlds = _QUICK_CHAIN if quick else _CHAIN
    kills, drawn, digest = _QUICK_KILLS if quick else _KILLS, random.Random(0), ""  # noqa: S311
    killed = 0
    for turn, ranks in enumerate(worlds):
        end = steps * (turn + 1) // len(worlds)
        placement = list(_PLANS)[turn % len(_PLANS)]
        life = _Life(directory, ranks, end, "sum", placement)
        while killed < kills * (turn + 1) // len(worlds):
            killed += life.run_and_kill(drawn)
        digest = life.run()
    return digest, killed


class _Life:
    """A run of torchrun's, which goes on from the last commit in its directory."""

    def __init__(
        self, directory: Path, ranks: int, steps: int, order: str | None, placement: str = "memory"
    ) -> None:
        self._directory, self._ranks = directory, ranks
        directory.mkdir(exist_ok=True)
        script = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        rank = ["-m", "benchmarks.cpu.worlds", str(directory), str(steps), placement]
        self._command = [sys.executable, *script, *rank, *([order] if order else [])]

    def run(self) -> str:
        """Return the digest of the weights at the end."""
        process = self._start()
        if process.wait() != 0:
            message = f"{self._command} failed"
            raise RuntimeError(message)
        report = json.loads((self._directory / "report.json").read_text(encoding="utf-8"))
        self.seconds_per_step = report["seconds_per_step"]
        digest: str = report["sha256"]
        return digest

    def run_and_kill(self, drawn: random.Random) -> bool:
        """Kill a rank at a moment that is drawn; return whether it was training still."""
        for path in self._directory.glob("pid-*"):
            path.unlink()
        process, deadline = self._start(), drawn.uniform(0.0, 1.5)
        while len(list(self._directory.glob("pid-*"))) < self._ranks and process.poll() is None:
            time.sleep(0.01)
        time.sleep(deadline)
        victim = self._directory / f"pid-{drawn.randrange(self._ranks)}"
        is_training = process.poll() is None
        if is_training:
            os.kill(int(victim.read_text(encoding="ascii")), signal.SIGKILL)
        return process.wait() != 0 and is_training

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        quiet = subprocess.DEVNULL
        return subprocess.Popen(
            self._command, stdout=quiet, stderr=quiet, cwd=root, env=environment
        )


# --- a rank ---


class _Model(nn.Module):
    """A small transformer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_WORDS, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
            for _ in range(_LAYERS)
        )
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def _train(directory: Path, steps: int, placement: str, order: Any) -> None:  # noqa: ANN401
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    per_rank = _MICRO_BATCHES // ranks
    plan = _PLANS[placement].but(ordered_reduce=order, accumulation_steps=per_rank)
    divisor = per_rank if order is None else _MICRO_BATCHES
    make = partial(AdamW, lr=1e-3, dir=directory / "run", commit_every=5)
    model, optimizer = stow(_Model(), make, plan=plan)
    begun = optimizer.resume() or 0
    (directory / f"pid-{rank}").write_text(str(os.getpid()), encoding="ascii")
    start = time.perf_counter()
    for step in range(begun, steps):
        for turn in range(per_rank):
            number = step * _MICRO_BATCHES + turn * ranks + rank
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(0, _WORDS, (1, 16), generator=generator)
            loss = functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1).flatten())
            (loss / divisor).backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.wait()
    seconds = (time.perf_counter() - start) / max(1, steps - begun)
    optimizer.commit()
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        whole: Any = value
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        digest.update(whole.contiguous().numpy().tobytes())
    if rank == 0:
        report = {"sha256": digest.hexdigest(), "seconds_per_step": seconds}
        (directory / "report.json").write_text(json.dumps(report), encoding="utf-8")
    optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("placement", choices=_PLANS)
    parser.add_argument("order", nargs="?")
    options = parser.parse_args()
    _train(options.directory, options.steps, options.placement, options.order)
