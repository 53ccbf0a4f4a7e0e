"""Squared norms of gradients, those that are not there, and those that are still copied."""

import math

import torch

from tensorstow.step.norms import KeptNorms, exact_total_norm, squared_norms


class Copied:
    """A copy that is made when somebody waits for it, or when it is ``made``."""

    def __init__(self, target: torch.Tensor, value: float) -> None:
        self.target, self.value, self.over = target, value, False

    def query(self) -> bool:
        return self.over

    def synchronize(self) -> None:
        self.target.fill_(self.value)
        self.over = True


def test_each_gradient_has_its_own() -> None:
    gradients = [torch.tensor([3.0, 4.0]), None, torch.ones(4, 4, dtype=torch.bfloat16).t()]
    assert list(squared_norms(gradients, None)) == [25.0, 0.0, 16.0]


def test_a_gradient_that_is_copied_is_not_read_before() -> None:
    kept, first, second = KeptNorms(None), torch.zeros(2), torch.zeros(2)
    copies = [Copied(first, 2.0), Copied(second, 3.0)]
    kept.take(7, first, copies[0])
    kept.take(3, second, copies[1])
    copies[0].synchronize()
    kept.take(5, torch.ones(3), None)
    first.fill_(9.0)  # it has been used, and its memory is another gradient's
    assert dict(kept.all()) == {7: 8.0, 5: 3.0, 3: 18.0}
    kept.clear()
    assert not kept.all()


def test_an_exact_norm_has_the_bits_of_one_rounding() -> None:
    big, small = torch.tensor([[2.0**30, 1.0], [1.0, 1.0]]), torch.tensor([2.0**-40] * 3)
    parameters = [torch.zeros(2, 2), torch.zeros(3), torch.zeros(2)]
    norm = exact_total_norm(parameters, [big, small, None], None).item()
    squares = [2.0**60 + 1.0, 2.0, *[2.0**-80] * 3]
    assert norm == math.sqrt(math.fsum(squares))
    assert exact_total_norm(parameters[:1], [big * math.inf], None) == math.inf
    assert exact_total_norm(parameters[:1], [big * math.nan], None).isnan()
    assert exact_total_norm(parameters[:1], [None], None) == 0.0
