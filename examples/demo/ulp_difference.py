"""One step of ours compared with one of torch's, from equal weights, states and gradients."""

from typing import Any

import torch

from demo.result import UlpDifference
from demo.training import Training

_SLICE = 1 << 20
_STATES = ("exp_avg", "exp_avg_sq")


def compare_one_step(training: Training) -> UlpDifference:
    """Take one more step with both optimizers, and return the difference of the weights.

    A weight near zero may be the remainder of larger numbers that cancelled. So a difference is
    measured in spacings of fp32 at the largest of the weight before, the weight after, and the step
    that the larger of momentum and gradient alone would have made.
    """
    training.make_gradients(len(training.losses))
    optimizer = training.optimizer
    group, states = optimizer.param_groups[0], optimizer.state_dict()["state"]
    steps = []
    for index, parameter in enumerate(group["params"]):
        before = parameter.detach().clone()
        theirs, largest = _torch_step(before, parameter.grad, states[index], group)
        steps.append((parameter, theirs, largest))
    optimizer.step()
    worst, differing, count = 0.0, 0, 0
    for parameter, theirs, largest in steps:
        ours = parameter.detach().reshape(-1)
        slices = (t.reshape(-1).split(_SLICE) for t in (ours, theirs, largest))
        for a, b, c in zip(*slices, strict=True):
            apart = (a.double() - b.double()).abs()
            worst = max(worst, (apart / _spacing(torch.maximum(c, a.abs()))).max().item())
            differing += int((a != b).sum())
            count += a.numel()
    return UlpDifference(worst, differing / count)


def _torch_step(
    before: torch.Tensor,
    gradient: torch.Tensor,
    state: dict[str, torch.Tensor],
    group: dict[str, Any],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return torch's weight after the step, and the largest number that it was computed from."""
    theirs = before.clone().requires_grad_()
    theirs.grad = gradient
    options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
    fused = torch.optim.AdamW([theirs], **options, fused=True)
    moments = {name: state[name].clone() for name in _STATES}
    fused.state[theirs] = {"step": state["step"].clone(), **moments}
    pull = torch.maximum(state["exp_avg"].abs(), gradient.abs())
    fused.step()
    (beta1, beta2), count = group["betas"], float(state["step"]) + 1
    second = (moments["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
    alone = pull.mul_(group["lr"] / (1 - beta1**count)).div_(second)
    return theirs.detach(), torch.maximum(before.abs(), alone)


def _spacing(sizes: torch.Tensor) -> torch.Tensor:
    """Return the distance to the next fp32 number above each size, in binary64."""
    above = torch.nextafter(sizes, torch.full_like(sizes, torch.inf))
    return above.double() - sizes.double()
