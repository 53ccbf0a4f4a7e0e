"""Steps that their caller waits for run on the OpenMP threads that torch computes with."""

import subprocess
import sys

import pytest

_CODE = """
import os
import torch
from tensorstow import AdamW

def busy():
    seconds = {}
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/schedstat") as f:
            seconds[thread] = int(f.read().split()[0]) / 1e9
    return seconds

torch.set_num_threads(2)
matrix = torch.rand(700, 700)
for _ in range(20):
    matrix @ matrix  # starts torch's team
weights = [torch.nn.Parameter(torch.rand(1 << 21)) for _ in range(2)]
with_team = set(os.listdir("/proc/self/task"))
optimizer = AdamW(weights, **OPTIONS)
for p in weights:
    p.grad = torch.rand_like(p)
optimizer.step()
before = busy()
for _ in range(60):
    optimizer.step()
after = busy()
grown = {t: after[t] - before.get(t, 0) for t in after}
ours = sum(v for t, v in grown.items() if t not in with_team)
theirs = sum(v for t, v in grown.items() if t in with_team)
print(ours, theirs)
optimizer.close()
"""


def busy_seconds(options: str) -> tuple[float, float]:
    """Return the seconds that threads of ours, and torch's, were busy in 60 steps."""
    done = subprocess.run(
        [sys.executable, "-c", _CODE.replace("OPTIONS", options)],
        capture_output=True,
        text=True,
        check=True,
    )
    ours, theirs = done.stdout.split()
    return float(ours), float(theirs)


@pytest.mark.parametrize("options", ["{}", "{'states': 'disk'}"])
def test_updates_run_on_torchs_threads(options: str) -> None:
    ours, theirs = busy_seconds(options)
    assert theirs > 0.1
    assert ours < theirs / 5  # threads of I/O sum and copy nothing


def test_another_number_of_threads_is_our_pools() -> None:
    policy = "{'policy': __import__('tensorstow').PipelinePolicy(threads=3)}"
    ours, theirs = busy_seconds(policy)
    assert ours > theirs / 4
