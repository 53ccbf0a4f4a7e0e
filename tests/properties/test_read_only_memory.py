"""The host memory of a model whose weights are on disk: that of its buffers, and no more."""

import json
from pathlib import Path

import children

MIB = 1 << 20
SLACK = 32 * MIB
"""Buffers of the I/O engine (eight of a MiB), threads, code that is loaded late, activations."""

CODE = """
import json, sys
from pathlib import Path
import torch
from torch import nn
from safetensors.torch import save_file
import tensorstow
from models import ResidualStack
from tensorstow.fsdp.read_only import stream_of
from tensorstow.report.rss import peak_bytes, resident_bytes, return_freed_memory

WIDTH, BLOCKS = 1024, 32  # of 4 MiB
torch.set_num_threads(1)
part = torch.randn(WIDTH, WIDTH) / 32
for first in range(0, BLOCKS, 8):
    tensors = {}
    for i in range(first, first + 8):
        tensors[f"blocks.{i}.weight"] = part.roll(i, 0)
        tensors[f"blocks.{i}.bias"] = torch.full((WIDTH,), float(i))
    save_file(tensors, Path(sys.argv[1]) / f"{first}.safetensors")
with torch.device("meta"):
    model = ResidualStack(WIDTH, BLOCKS)
del tensors
x = torch.ones(4, WIDTH)
x @ part
return_freed_memory()
before = resident_bytes()
Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
plan = tensorstow.Plan(parameters="disk")
model, _ = tensorstow.stow(model, None, plan=plan, weights=sys.argv[1])
total = sum(p.nbytes for p in model.parameters())
with torch.no_grad():
    first = model(x)
    same = all(torch.equal(model(x), first) for _ in range(1))
stream = stream_of(model)
print(json.dumps({
    "grown": peak_bytes() - before, "buffers": stream.host.memory.capacity, "total": total,
    "high": stream.host.memory.peak, "read": stream.bytes_read, "same": same,
}))
"""


def test_host_memory_is_that_of_the_buffers(tmp_path: Path) -> None:
    found = json.loads(children.run("-c", CODE, tmp_path).stdout)
    assert found["same"]
    assert found["high"] == found["buffers"] <= 3 * (4 * MIB + 8192)
    assert found["grown"] <= found["buffers"] + SLACK
    assert found["grown"] < found["total"] // 2  # what it would hold of weights alone
    assert (
        2 * found["total"] - found["buffers"]
        <= found["read"]
        <= 2 * found["total"] + found["buffers"]
    )
