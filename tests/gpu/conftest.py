"""Tests that need an accelerator; without one they are skipped, each with the reason."""

import sys
from collections.abc import Callable, Iterator
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
    return torch.device(found.type, torch.accelerator.current_device_index())


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
