"""The Adam step and the gradient norm in plain torch, which the kernels match bit for bit.

The rule is that of Kingma & Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015), with the
decoupled weight decay of Loshchilov & Hutter, "Decoupled Weight Decay Regularization" (ICLR 2019),
and the running maximum of Reddi, Kale & Kumar, "On the Convergence of Adam and Beyond" (ICLR 2018).
The order of operations is that of `torch.optim.AdamW(foreach=False, fused=False)`.

Every torch call below is one rounding to float32. `addcmul`, `addcdiv` and `lerp` are avoided: they
may fuse a multiply and an add. The average of weights alone is fused, as `torch.lerp` is on a CPU
that can: there the rounding is computed in float64. States in a format are decoded, updated and
encoded.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tensorstow.base.errors import OptionError
from tensorstow.formats.state_format import StateFormat, decode, encode, state_names

NORM_BLOCK = 1 << 16
_TenFloats = ctypes.c_float * 10
_NORM_LANES = 16


class AdamScalars(NamedTuple):
    """One step's hyper-parameters, exact in float32, in the order of the kernels' `AdamHyper`."""

    beta1_weight: float
    """1 - beta1"""
    beta2: float
    beta2_weight: float
    """1 - beta2"""
    decay: float
    """1 - lr * weight_decay if the decay is decoupled, else 1"""
    l2: float
    """weight_decay if it is a penalty added to the gradient, else 0"""
    step_size: float
    """lr / (1 - beta1^step)"""
    denom_scale: float
    """1 / sqrt(1 - beta2^step)"""
    eps: float
    grad_factor: float
    """unscaling and clipping in one factor; negative when maximizing"""
    ema_weight: float = 1.0
    """1 - decay of the average of weights; 1 makes it the weight"""


@dataclass(slots=True)
class AdamState:
    """One parameter's optimizer state: float32 tensors of the parameter's shape."""

    m: Tensor
    v: Tensor
    master: Tensor | None = None
    """The fp32 weight if the parameter is bfloat16 or float16, else None."""
    vmax: Tensor | None = None
    """The running maximum of v with amsgrad, else None."""
    ema: Tensor | None = None
    """The average of weights, if one is kept."""


def adam_scalars(  # noqa: PLR0913  # a step's numbers, all by keyword
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    decoupled: bool,
    bias_correction: bool = True,
    grad_factor: float = 1.0,
    ema_weight: float = 1.0,
) -> AdamScalars:
    """Compute one step's scalars in float64 and round each to float32 once.

    `step` counts from 1. `decoupled` chooses AdamW's weight decay over Adam's L2 penalty. Pass a
    negative `grad_factor` to maximize. `ema_weight` is 1 - decay of the average. Raises OptionError
    where a beta lies outside [0, 1) or `step` is below 1.
    """
    beta1, beta2 = betas
    if not (0.0 <= beta1 < 1.0 and 0.0 <= beta2 < 1.0):
        message = f"betas={betas} is outside [0, 1): choose e.g. (0.9, 0.999)."
        raise OptionError(message)
    if step < 1:
        message = f"step={step} is below 1: the first step is number 1."
        raise OptionError(message)
    correction1 = 1.0 - beta1**step if bias_correction else 1.0
    correction2 = 1.0 - beta2**step if bias_correction else 1.0
    rounded = _TenFloats(
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 - lr * weight_decay if decoupled else 1.0,
        0.0 if decoupled else weight_decay,
        lr / correction1,
        1.0 / math.sqrt(correction2),
        eps,
        grad_factor,
        ema_weight,
    )
    return AdamScalars(*rounded)


def adam_reference(
    param: Tensor,
    grad: Tensor,
    state: AdamState,
    scalars: AdamScalars,
    *,
    seed_master: bool = False,
) -> None:
    """Update `param` and `state` in place by one step.

    `param` and `grad` are float32, bfloat16 or float16, in any combination, of one shape.
    `seed_master` first sets the master to the parameter's value. Raises OptionError where `state`
    has a master for a float32 parameter or none for a 16-bit one.
    """
    if (state.master is None) != (param.dtype == torch.float32):
        wants = "a" if state.master is None else "no"
        message = f"A {param.dtype} parameter goes with {wants} master: only 16-bit ones have one."
        raise OptionError(message)
    weight = param if state.master is None else state.master
    if seed_master and state.master is not None:
        state.master.copy_(param)
    g = grad.float() * scalars.grad_factor
    if scalars.l2 != 0.0:
        g = g + weight * scalars.l2
    state.m.copy_(_first_moment(state.m, g, scalars.beta1_weight))
    state.v.copy_(state.v * scalars.beta2 + (g * scalars.beta2_weight) * g)
    u = state.v
    if state.vmax is not None:
        keeps = (state.vmax > state.v) | state.vmax.isnan()  # NaN stays, as by torch.maximum
        u = state.vmax.copy_(torch.where(keeps, state.vmax, state.v))
    # Through float64: torch's float32 square root is not correctly rounded on every CPU.
    denominator = u.double().sqrt().float() * scalars.denom_scale + scalars.eps
    weight.copy_(weight * scalars.decay - (state.m * scalars.step_size) / denominator)
    if state.master is not None:
        param.copy_(state.master)
    if state.ema is not None:
        state.ema.copy_(_average(state.ema, weight, scalars.ema_weight))


def squared_norm_reference(grad: Tensor) -> float:
    """Sum the squares of `grad` (float32, bfloat16 or float16; any shape) in float64.

    The tree is fixed: blocks of `NORM_BLOCK` elements; in a block, element i adds to lane i % 16 in
    order; lanes are added pairwise, the upper half to the lower; blocks are added in order.
    """
    total = 0.0
    for block in torch.split(grad.detach().flatten(), NORM_BLOCK):
        rows = -(-block.numel() // _NORM_LANES)
        wide = torch.zeros(rows * _NORM_LANES, dtype=torch.float64)
        wide[: block.numel()] = block
        lanes = torch.zeros(_NORM_LANES, dtype=torch.float64)
        for row in (wide * wide).view(rows, _NORM_LANES):
            lanes = lanes + row
        while lanes.numel() > 1:
            half = lanes.numel() // 2
            lanes = lanes[:half] + lanes[half:]
        total += lanes.item()
    return total


def _first_moment(m: Tensor, g: Tensor, weight: float) -> Tensor:
    """Move m towards g by `weight`, from the nearer end, so that a weight of 1 gives g itself."""
    if weight >= 0.5:
        return g + (g - m) * (weight - 1.0)
    return m + (g - m) * weight


def _average(average: Tensor, weight: Tensor, by: float) -> Tensor:
    """Move an average towards the weight by ``by``, from the nearer end: `torch.lerp`, fused."""
    if by == 1.0:
        return weight
    near_weight = by >= 0.5
    base = weight if near_weight else average
    return _fused_multiply_add(weight - average, by - 1.0 if near_weight else by, base)


def _fused_multiply_add(a: Tensor, b: float, c: Tensor) -> Tensor:
    """Return ``a * b + c``, rounded to float32 once; ``b`` is exact in float32."""
    product, c = a.double() * b, c.double()  # 48 bits: exact
    total = product + c
    # The error of the sum, exactly, by Knuth's two-sum.
    back = total - product
    error = (product - (total - back)) + (c - back)
    # To odd, so that float32 is not decided by a number that was rounded to its midpoint.
    bits = total.view(torch.int64)
    towards = torch.where((error > 0.0) == (total > 0.0), 1, -1)
    inexact_even = (error.abs() > 0.0) & (bits & 1 == 0)
    return torch.where(inexact_even, bits + towards, bits).view(torch.float64).float()


@dataclass(frozen=True, slots=True)
class FormattedStates:
    """The states of a 1-D parameter in a format: the streams of ``streams_of``."""

    streams: Sequence[Tensor]
    format: StateFormat
    amsgrad: bool
    first: int = 0
    """Index in the parameter of the first element."""
    ema: bool = False


def adam_reference_in_format(
    param: Tensor,
    grad: Tensor,
    formatted: FormattedStates,
    scalars: AdamScalars,
    *,
    key: int = 0,
    seed_master: bool = False,
) -> None:
    """Update ``param`` and ``formatted`` in place by one step, as ``adam_reference`` does.

    All tensors are on the same device. ``key`` selects the random bits of a parameter and step.
    """
    in_place = formatted.format == StateFormat.FP32
    if in_place:
        names = state_names(param.dtype, amsgrad=formatted.amsgrad, ema=formatted.ema)
        states = dict(zip(names, formatted.streams, strict=True))
    else:
        states = decode(
            formatted.streams,
            param,
            formatted.format,
            amsgrad=formatted.amsgrad,
            ema=formatted.ema,
        )
    state = AdamState(
        states["exp_avg"],
        states["exp_avg_sq"],
        master=states.get("master"),
        vmax=states.get("max_exp_avg_sq"),
        ema=states.get("ema"),
    )
    adam_reference(param, grad, state, scalars, seed_master=seed_master)
    if in_place:
        return
    encode(
        states,
        param,
        formatted.streams,
        formatted.format,
        amsgrad=formatted.amsgrad,
        ema=formatted.ema,
        key=key,
        first=formatted.first,
    )
