"""torch's elementwise functions are first called by one thread: MKL looks their kernels up then."""

import subprocess
import sys

import pytest

from tensorstow.base.first_calls import DTYPES, FUNCTIONS

WATCHED_IMPORT = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            print(function.overloadpacket.__name__, result.dtype, result.numel())
        return result

with Watch():
    from tensorstow import {name}
"""


@pytest.mark.parametrize("name", ["AdamW", "offload_activations"])
def test_each_is_called_when_what_computes_is_imported(name: str) -> None:
    script = WATCHED_IMPORT.replace("{name}", name)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    called = set(done.stdout.splitlines())
    assert {f"{name} {dtype} 1" for name in FUNCTIONS for dtype in DTYPES} <= called
