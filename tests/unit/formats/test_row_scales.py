"""Matrices in int8 with a scale for each row: how far they are from the original, at most."""

import pytest
import torch

from tensorstow.formats.row_scales import dequantize_rows, quantize_rows


@pytest.mark.parametrize("magnitude", [1e-44, 1e-32, 1e-8, 1.0, 1e30])
def test_a_value_is_half_a_scale_off_at_most(magnitude: float) -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 300) * magnitude
    w[3], w[4, 7] = 0, 5 * magnitude
    codes, scale = quantize_rows(w)
    assert codes.dtype == torch.int8
    assert scale.dtype == torch.float32
    found = torch.empty_like(w)
    dequantize_rows(codes, scale, found)
    off = (w.double() - found.double()).abs()
    assert (off <= scale.double()[:, None] * (0.5 + 2**-16)).all()
    assert not found[3].any()
    if magnitude > 1e-30:  # what is less is kept as zeros
        assert torch.allclose(scale, w.abs().amax(1) / 127)
        assert off.max() > 0.4 * scale.max()  # it is no exact format


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_pieces_of_rows_are_the_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    codes = torch.randint(-127, 128, (5, 700_000), dtype=torch.int8)
    scale, found = torch.rand(5, 1), torch.empty(5, 700_000, dtype=dtype)
    dequantize_rows(codes, scale, found)
    assert torch.equal(found, (codes.float() * scale).to(dtype))


def test_no_rows_and_no_columns() -> None:
    for shape in ((0, 3), (3, 0)):
        dequantize_rows(
            torch.zeros(shape, dtype=torch.int8), torch.ones(shape[0]), torch.ones(shape)
        )
