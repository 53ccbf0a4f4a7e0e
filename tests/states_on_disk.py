"""Child programs with states on disk, which print how much memory saving and loading take."""

import children

_BEGIN = """
import sys
import torch
from tensorstow import AdamW

path = sys.argv[1]

def memory(name):
    lines = open("/proc/self/status", encoding="ascii").read().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith(name)) // 1024

def reset():  # the high-water mark becomes what is held now
    open("/proc/self/clear_refs", "w").write("5")

def make(count, rows, dtype=torch.float32, durability="none"):
    weights = [torch.nn.Parameter(torch.ones(rows, 8, dtype=dtype)) for _ in range(count)]
    return weights, AdamW(weights, states="disk", dir=path, durability=durability)

def trained(*given):
    weights, optimizer = make(*given)
    for w in weights:
        w.grad = torch.full_like(w, 0.5)
    optimizer.step()
    optimizer.synchronize()
    for w in weights:
        w.grad = None
    return optimizer
"""


def printed(code: str, *words: object) -> list[int]:
    """Return the numbers that a program prints; its arguments are the directory and others."""
    run = children.run("-c", _BEGIN + code, *map(str, words), timeout=250)
    return list(map(int, run.stdout.split()))
