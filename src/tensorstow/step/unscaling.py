"""Divides gradients by the scale of ``torch.amp.GradScaler``, as torch leaves them.

[Note: Unscaling] After ``scaler.step(optimizer)`` torch's optimizers leave ``.grad`` divided by
the scale, whether their step was taken or not, and so do ours. An fp32 gradient is multiplied in
place, before its update, which reads the product: the bits of an update that multiplies by the
scale's reciprocal itself. A 16-bit one would lose the small values that the scale keeps, so its
update reads a copy that is still scaled. The multiplication is before the update under every
schedule: during the next forward ``.grad`` would change while it is read.

[Note: Scaling on two devices] The scale is on the device of the first scaled loss. torch copies it
to the other devices that have gradients, and copies their flags of inf and NaN back. The host reads
such copies from an accelerator without waiting for them: gradients are multiplied by undefined
values, and steps are skipped at random. ``step()`` cannot correct that and raises an error.
"""

from collections.abc import Iterable, Sequence

import torch

from tensorstow.base.errors import OptionError
from tensorstow.step.managed_param import ParamUpdate
from tensorstow.tensors.dtensor import anywhere, gradient_of


def is_skipped(found_inf: torch.Tensor, parameters: Sequence[torch.Tensor]) -> bool:
    """Return whether a GradScaler has found an inf or NaN on any rank.

    Raises OptionError if that is undefined: see [Note: Scaling on two devices].
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    apart = [g for g in gradients if g.is_cpu != found_inf.is_cpu]
    if apart:
        message = (
            f"A GradScaler whose scale is on {found_inf.device} was used with a gradient on"
            f" {apart[0].device}: torch reads copies between them before they are complete."
            " Scale a loss on the device of all gradients, or use bfloat16 without a GradScaler."
        )
        raise OptionError(message)
    return anywhere(parameters, on_this_rank=bool(found_inf.item()))


def unscale(parameters: Iterable[torch.Tensor], scale: float) -> None:
    """Divide the gradients by ``scale`` in place."""
    gradients = [g for p in parameters if (g := gradient_of(p)) is not None]
    if gradients and scale != 1.0:
        torch._foreach_mul_(gradients, 1.0 / scale)


def unscaled(updates: list[ParamUpdate], scale: float) -> list[ParamUpdate]:
    """Divide the gradients by ``scale`` in place; return the updates that read them."""
    read = [_copied(update, scale) for update in updates]
    unscale((update.param.owner for update in updates), scale)
    return [_read_anew(update) for update in read]


def _copied(update: ParamUpdate, scale: float) -> ParamUpdate:
    """Return the update with a copy of a 16-bit gradient, as ``.grad`` will be multiplied."""
    if update.gradient is None or update.gradient.dtype == torch.float32:
        return update
    return update._replace(gradient=update.gradient.clone(), scale=scale)


def _read_anew(update: ParamUpdate) -> ParamUpdate:
    """Return the update with the unscaled ``.grad``, if its fp32 gradient was copied before."""
    gradient = gradient_of(update.param.owner)
    if update.scale != 1.0 or gradient is None or gradient.is_contiguous():
        return update
    return update._replace(gradient=gradient.contiguous())
