"""Tests that need an accelerator; without one they are skipped, each with the reason."""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # helpers of the other tests

from ranks.pool import Ranks


@pytest.fixture
def device() -> torch.device:
    """Return torch's current accelerator."""
    if not torch.accelerator.is_available():
        pytest.skip("torch.accelerator has no device here")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    here = torch.device(found.type, torch.accelerator.current_device_index())
    _take_workspaces(here)
    return here


@cache
def _take_workspaces(device: torch.device) -> None:
    """Let libraries of linear algebra take the memory that they keep, for tests that count bytes.

    cuBLAS takes 32 MiB on an H100, once for each thread that computes: the caller's, backward's.
    """
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        linear = torch.nn.Linear(64, 64, device=device, dtype=dtype)
        linear(torch.ones(8, 64, device=device, dtype=dtype)).sum().backward()


@pytest.fixture(scope="session")
def device_ranks() -> Iterator[Callable[[int], Ranks]]:
    """Give processes with an accelerator each by their number, started when first asked for."""
    pools: dict[int, Ranks] = {}

    def get(world: int) -> Ranks:
        found = torch.accelerator.current_accelerator()
        assert found is not None
        if found.type != "simulated" and world > torch.accelerator.device_count():
            pytest.skip(f"needs {world} accelerators")  # the simulated one is each process's own
        if world not in pools:
            pools[world] = Ranks(world, found.type)
        return pools[world]

    yield get
    for pool in pools.values():
        pool.close()
