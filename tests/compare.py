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


def same_products(
    ours: torch.Tensor,
    theirs: torch.Tensor,
    magnitude: torch.Tensor,
    additions: int,
    parts: int = 1,
) -> bool:
    """Return whether two sums of the same products differ by rounding alone.

    In any order a sum of n terms is within gamma(n) times the sum of their magnitudes of the exact
    one: gamma(n) = n u / (1 - n u), u the unit roundoff (Higham, Accuracy and Stability, 3.1).

    Args:
        ours: One result. Products of 16-bit operands are added in fp32, and rounded.
        theirs: The other one.
        magnitude: The sum of the products of the operands' magnitudes, in float64.
        additions: How many terms each sum has.
        parts: Into how many sums, each rounded, one of both is cut.
    """
    is_wide = ours.dtype.itemsize > 2
    bound = 1 + _gamma(additions + parts, ours.dtype if is_wide else torch.float32)
    if not is_wide:
        bound *= 1 + _gamma(parts + 1, ours.dtype)
    difference = (ours.double() - theirs.double()).abs()
    return bool((difference <= 2 * (bound - 1) * magnitude).all())


def _gamma(count: int, dtype: torch.dtype) -> float:
    unit = torch.finfo(dtype).eps / 2
    return count * unit / (1 - count * unit)
