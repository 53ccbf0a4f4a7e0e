"""How far our Adam step may be from torch.optim's, and how that is measured."""

import math

import torch
from torch import Tensor

# How far one step may be from torch.optim's, in float32 spacings. Both compute the same formula,
# but torch fuses some multiplies and adds, divides by sqrt(bias_correction2) where we multiply,
# and its vectorised square root is off by a spacing now and then: for the parameter up to eight
# relative errors of 2^-24, each half a spacing to a whole one. The worst of 5e8 random elements
# (AVX-512, torch 2.13) was 2, 5 and 6; L2 makes m and v worse, for its sum differs already.
#
# A sum can cancel, so a spacing is taken at the largest term that went into the value, not at the
# value: for m at max(|m|, |g|); for v, whose terms are positive, at v; for the parameter at the
# largest of |p_old|, |p_new| and the step that max(|m|, |g|) alone would have made.
M_SPACINGS = 3.0
V_SPACINGS = 7.0
P_SPACINGS = 8.0


def spacing(x: Tensor) -> Tensor:
    """Return the distance from |x| to the next float32 above."""
    x = x.abs()
    return torch.nextafter(x, torch.tensor(math.inf)) - x


def spacings(got: Tensor, want: Tensor, *terms: Tensor) -> float:
    largest = torch.stack([t.abs() for t in terms]).amax(0)
    return ((got.double() - want.double()).abs() / spacing(largest).double()).max().item()
