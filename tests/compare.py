"""What tests of equal results say."""

from collections.abc import Iterable

import torch


def all_equal(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    """Return whether there are as many of both, with equal elements; raise where there are not."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
