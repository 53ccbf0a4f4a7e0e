"""Parameters sharded over more than one mesh dimension."""

import pytest
import torch

from ranks.pool import Ranks
from ranks.tensor_parallel import alone, parallel


@pytest.mark.parametrize(("world", "data"), [(2, 1), (4, 2)], ids=["tensor", "data x tensor"])
def test_norms_are_over_every_mesh_dimension(ranks: "Ranks", world: int, data: int) -> None:
    norms, weights = alone()
    assert all(norm > 0.5 for norm in norms)  # so that a wrong norm is a wrong step
    told = ranks(world).run(parallel, data)
    assert all(got == told[0][0] for got, _ in told)  # to the bit: or ranks would drift apart
    for got, trained in told:
        assert got == pytest.approx(norms, rel=1e-5)
        for weight, want in zip(trained, weights, strict=True):
            torch.testing.assert_close(weight, want, rtol=1e-4, atol=1e-5)
