"""What all tests of trainers share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """So small a model is slower with two, which spin beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _environment(kept_environment: None) -> None:
    """Trainers write a rank's variables, by which the next ones would join others."""
