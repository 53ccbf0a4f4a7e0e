"""Tests that need an accelerator; without one they are skipped, each with the reason."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # helpers of the other tests


@pytest.fixture
def device() -> torch.device:
    """Return torch's current accelerator."""
    if not torch.accelerator.is_available():
        pytest.skip("torch.accelerator has no device here")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())
