"""torch's elementwise functions are first called by one thread: MKL looks their kernels up then."""

import subprocess
import sys

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
    import tensorstow
"""


def test_each_is_called_when_tensorstow_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WATCHED_IMPORT], capture_output=True, text=True, check=True
    )
    called = set(done.stdout.splitlines())
    assert {f"{name} {dtype} 1" for name in FUNCTIONS for dtype in DTYPES} <= called
