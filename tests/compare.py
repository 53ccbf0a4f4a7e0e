"""What tests of equal results say."""

from collections.abc import Iterable

import torch


def all_equal(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> bool:
    """Return whether there are as many of both, with equal elements; raise where there are not."""
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def assert_same(
    ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor], *, is_exact: bool = True
) -> None:
    """Fail unless both have equal elements; where not ``is_exact``, within a few fp32 roundings."""
    for a, b in zip(ours, theirs, strict=True):
        if is_exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
