"""Rates of host memory, the update kernel and torch's operations on this machine."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tensorstow.base.cores import affinity_cores
from tensorstow.base.profile import ComputeRates, dtype_key, update_key
from tensorstow.io.arena import Arena
from tensorstow.states.update_trial import FAMILIES, PARAMETERS, checksum_trial, update_trial

_MEMORY_BYTES = 256 << 20
_LEAST_REPEATS = 3
_CPU_DTYPES = (torch.float32, torch.bfloat16)
_PRODUCT = (512, 1024, 4096)
_PRODUCT_AWAY = (8192, 4096, 8192)
"""Rows, inner and columns of a product: those of a block of a small and of a large model."""
_ELEMENTWISE_BYTES = 4 << 20
_COLUMNS = 512
_ROW = 30
"""Elementwise operations in a row: their tensors exceed a cache."""
_CHECKSUM_BYTES = 4 << 20
_CHAIN = 100


def fastest(work: Callable[[], object], seconds: float) -> float:
    """Return the seconds of the fastest of three calls or more; the first is not counted."""
    work()
    best, repeats, end = float("inf"), 0, time.perf_counter() + seconds
    while repeats < _LEAST_REPEATS or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)  # other load only adds to it
        repeats += 1
    return best


def measure_memory(seconds: float = 0.6) -> tuple[float, float, float]:
    """Return bytes per second that all cores read, write and copy; a copy reads and writes."""
    arena = Arena(_MEMORY_BYTES, in_children=True)
    whole = arena.tensor(0, _MEMORY_BYTES // 4, torch.float32).fill_(1.0)
    low, high = whole.chunk(2)
    turn = seconds / 3
    return (
        whole.nbytes / fastest(whole.sum, turn),
        whole.nbytes / fastest(lambda: whole.fill_(1.0), turn),
        whole.nbytes / fastest(lambda: high.copy_(low), turn),
    )


def measure_checksums(seconds: float = 0.1) -> float:
    """Return bytes per second that all cores checksum, in pieces as large as transfers."""
    one = fastest(checksum_trial(_CHECKSUM_BYTES), seconds)
    return affinity_cores() * _CHECKSUM_BYTES / one


def measure_updates(seconds: float = 1.0) -> dict[str, float]:
    """Return parameters per second that the update kernel updates, by "dtype/format"."""
    turn = seconds / len(FAMILIES)
    return {
        update_key(dtype, format_): PARAMETERS / fastest(update_trial(dtype, format_), turn)
        for dtype, format_ in FAMILIES
    }


def measure_compute(device: torch.device, seconds: float = 1.5) -> ComputeRates:
    """Return the rates of forward and backward on a device."""
    away = device.type != "cpu"
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if away else _CPU_DTYPES
    rows, inner, columns = _PRODUCT_AWAY if away else _PRODUCT
    turn = seconds / (len(dtypes) + 3)
    flops = {}
    for dtype in dtypes:
        left = torch.randn(rows, inner, device=device, dtype=dtype)
        right = torch.randn(inner, columns, device=device, dtype=dtype)
        took = fastest(waited(partial(torch.matmul, left, right), device), turn)
        flops[dtype_key(dtype)] = 2 * rows * inner * columns / took
    return ComputeRates(
        flops,
        _tensor_bytes_rate(device, turn),
        _call_seconds(device, turn),
        _random_rate(device, turn),
    )


def _tensor_bytes_rate(device: torch.device, seconds: float) -> float:
    """Return bytes per second of the operations of a block other than matrix products.

    They are a sum, an elementwise product, an activation, a softmax, and a copy in another order.
    Their results stay in memory, as those of forward do.
    """
    shape = (_ELEMENTWISE_BYTES // 4 // _COLUMNS, _COLUMNS)
    operands, into = ([torch.ones(shape, device=device) for _ in range(_ROW)] for _ in range(2))
    turned = [result.view(_COLUMNS, shape[0]) for result in into]

    def row() -> None:
        last = operands[0]
        for n in range(0, _ROW, 5):
            last = torch.add(last, operands[n], out=into[n])
            last = torch.mul(last, operands[n + 1], out=into[n + 1])
            last = torch.tanh(last, out=into[n + 2])
            last = torch.softmax(last, -1, out=into[n + 3])
            last = turned[n + 4].copy_(last.t()).view(shape)

    moved = (3 + 3 + 2 + 2 + 2) * operands[0].nbytes * _ROW // 5
    return moved / fastest(waited(row, device), seconds)


def _random_rate(device: torch.device, seconds: float) -> float:
    mask = torch.empty(_ELEMENTWISE_BYTES // 4, device=device)
    return mask.numel() / fastest(waited(partial(mask.bernoulli_, 0.9), device), seconds)


def waited(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """Return a function that calls ``work`` and waits for the device."""

    def run() -> None:
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    return run


def _call_seconds(device: torch.device, seconds: float) -> float:
    """Return the seconds of one operation on few elements, in forward and backward alike."""
    weight = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        value = weight
        for _ in range(_CHAIN):
            value = value * weight + weight  # no product: oneDNN's operations wait for threads
        torch.autograd.backward(value.sum())
        weight.grad = None

    counted = _Count()
    with counted:
        chain()
    return fastest(waited(chain, device), seconds) / counted.calls


class _Count(TorchDispatchMode):
    """Counts calls of torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch is untyped here
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        self.calls += 1
        return func(*args, **(kwargs or {}))
