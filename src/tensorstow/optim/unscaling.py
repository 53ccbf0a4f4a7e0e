"""What ``torch.amp.GradScaler`` leaves in ``.grad``: gradients without its scale.

[Note: Unscaling] Behind ``scaler.step(optimizer)`` torch's optimizers leave ``.grad`` divided by
the scale, whether their step was taken or not, and so do ours. An fp32 gradient is multiplied where
it is, before its update, which reads the product: the bits of an update that multiplies by the
scale's reciprocal itself. A 16-bit one would lose what the scale is there to keep, so its update
reads a copy that is still scaled. The multiplication is before the update under every schedule:
beside the next forward ``.grad`` would change under who reads it.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from tensorstow.optim.shards import gradient_of
from tensorstow.optim.updates import Due


def unscale(parameters: Iterable[torch.Tensor], scale: float) -> None:
    """Divide the gradients by ``scale``, where they are."""
    gradients = [g for p in parameters if (g := gradient_of(p)) is not None]
    if gradients and scale != 1.0:
        torch._foreach_mul_(gradients, 1.0 / scale)


def unscaled(dues: list[Due], scale: float) -> list[Due]:
    """Divide the gradients by ``scale``, where they are; return who is updated by what then."""
    if scale == 1.0:
        return dues
    kept = [_copied(due, scale) for due in dues]
    unscale((due.member.owner for due in dues), scale)
    return [_read_anew(due) for due in kept]


def _copied(due: Due, scale: float) -> Due:
    """Return a due whose 16-bit gradient is a copy: ``.grad`` is multiplied under it."""
    if due.gradient is None or due.gradient.dtype == torch.float32:
        return due
    return replace(due, gradient=due.gradient.clone(), scale=scale)


def _read_anew(due: Due) -> Due:
    """Return a due whose fp32 gradient is what ``.grad`` is now, where it was copied before."""
    gradient = gradient_of(due.member.owner)
    if due.scale != 1.0 or gradient is None or gradient.is_contiguous():
        return due
    return replace(due, gradient=gradient.contiguous())
