"""Calls torch's elementwise functions once, before two threads may call them at once.

[Note: First calls] torch computes ``tanh``, ``sqrt`` and their like with MKL, a piece of a tensor
in each thread. MKL (to 2024.2) looks up a function's kernel at its first call. Where two threads
make that at once, one of them may run a kernel of low accuracy: in one process of some tens to
hundreds the first result has other bits (https://github.com/pytorch/pytorch/issues/188792). A run
that goes on from a commit is to have the bits of one that was not stopped, so the first calls are
made here, by one thread.
"""

import torch

FUNCTIONS = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "lgamma", "log",
    "log10", "log1p", "log2", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""Names of the functions; those that round to integers have one result whatever computes them."""
DTYPES = (torch.float32, torch.float64)
"""What MKL has them for."""


def make_first_calls() -> None:
    """Call each function once for each dtype; some 0.2 ms."""
    for dtype in DTYPES:
        one = torch.ones(1, dtype=dtype, device="cpu")
        for name in FUNCTIONS:
            getattr(torch, name)(one)
