"""Squared norms of gradients, and those that are not there."""

import torch

from tensorstow.step.norms import squared_norms


def test_each_gradient_has_its_own() -> None:
    gradients = [torch.tensor([3.0, 4.0]), None, torch.ones(4, 4, dtype=torch.bfloat16).t()]
    assert list(squared_norms(gradients, None)) == [25.0, 0.0, 16.0]
