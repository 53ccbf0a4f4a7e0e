"""Squared norms of gradients, those that are not there, and those that are still copied."""

import torch

from tensorstow.step.norms import KeptNorms, squared_norms


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
