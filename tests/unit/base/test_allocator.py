"""Freed blocks go back to the system."""

import os
import subprocess
import sys

import pytest

_CODE = """
import torch
from tensorstow.base.allocator import give_back_large_blocks

def resident():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096

{call}
for _ in range(3):  # each that is freed raises glibc's own threshold
    torch.ones(7 << 20, dtype=torch.uint8)
before = resident()
blocks = [torch.ones(6 << 20, dtype=torch.uint8) for _ in range(20)]
del blocks[:-1]  # the last one is above all others in a heap
print(resident() - before)
"""


def _kept(call: str, **environment: str) -> int:
    code = _CODE.format(call=call)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return int(done.stdout)


def test_large_blocks_go_back_when_freed() -> None:
    assert _kept("assert give_back_large_blocks()") < 10 << 20
    assert _kept("") > 60 << 20  # else there would be nothing to mend


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "33554432"),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=33554432"),
    ],
)
def test_a_threshold_of_the_user_s_is_kept(name: str, value: str) -> None:
    assert _kept("assert not give_back_large_blocks()", **{name: value}) > 60 << 20
