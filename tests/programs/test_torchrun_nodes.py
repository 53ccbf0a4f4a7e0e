"""Two ranks that torchrun starts have half of the machine's nodes and cores each."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ranks.halved
from tensorstow import AdamW
from tensorstow.io.engine import DEPTH
from topology import make_nodes

CORES = sorted(os.sched_getaffinity(0))


@pytest.mark.skipif(len(CORES) < 2, reason="one core is one node")
def test_two_ranks_of_torchrun_have_half_each(tmp_path: Path) -> None:
    half = len(CORES) // 2
    lists = {0: CORES[:half], 1: CORES[half : 2 * half]}
    folder = make_nodes(tmp_path / "nodes2", {n: ",".join(map(str, c)) for n, c in lists.items()})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LOCAL_")}
    script = [str(ranks.halved.__file__), str(folder), str(tmp_path)]
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    run = subprocess.run(
        [*command, *script], capture_output=True, text=True, env=environ, check=False
    )
    assert run.returncode == 0, run.stderr
    weights = ranks.halved.make_weights()
    ranks.halved.train(AdamW(weights, lr=1e-2), weights)
    for rank in range(2):
        told = json.loads((tmp_path / f"rank{rank}.json").read_text(encoding="utf-8"))
        assert told == {
            "threads": half,
            "nodes": [rank],
            "depth": DEPTH // 2,
            "are_native_bound": True,
            "cores": lists[rank],
            "caller": CORES,
            "weights": ranks.halved.digest(weights),
        }
