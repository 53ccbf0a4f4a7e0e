"""``deepspeed.utils``: whole fp32 weights, gradients and states of a parameter, to read and set.

The ``full`` ones are collective: every rank is to call them. The ``local`` ones are of this rank's
elements. All of them settle an update that is under way first.
"""

import torch

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.registry import optimizer_of
from tensorstow.deepspeed.spread import joined, own_of, rows_of
from tensorstow.step.param_table import in_shape_of
from tensorstow.step.step_plan import as_step
from tensorstow.tensors.consumed_gradient import LandedGradient
from tensorstow.tensors.dtensor import gradient_of, shard_of
from tensorstow.tensors.on_disk import StateOnDisk

_FP32 = "fp32"
_MASTER = "master"


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """Return the whole fp32 weight: the master of a 16-bit one."""
    return joined(safe_get_local_fp32_param(param), param)


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the whole gradient in fp32, summed so far; None where there is none.

    Between ``backward`` and ``step``; under fp16 it is still multiplied by the loss scale.
    """
    own = safe_get_local_grad(param)
    return None if own is None else joined(own, param)


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a whole state ("exp_avg", "exp_avg_sq"), or None before the first step."""
    own = safe_get_local_optimizer_state(param, optim_state_key)
    return None if own is None else joined(own, param)


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Let the weight, and the master of a 16-bit one, be ``value``, the same on every rank."""
    safe_set_local_fp32_param(param, rows_of(_like(param, value), param))


def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Let a state be ``value``, the same on every rank, from the next step on."""
    own = rows_of(_like(param, value), param)
    safe_set_local_optimizer_state(param, own, optim_state_key)


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of the fp32 weight."""
    optimizer = optimizer_of(param)
    optimizer.wait([param])
    own = own_of(param).detach().cpu()
    if own.dtype != torch.float32:
        master = safe_get_local_optimizer_state(param, _MASTER)
        return own.float() if master is None else master
    return own.clone()


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's elements of the gradient in fp32; None where there is none."""
    gradient = gradient_of(param)
    if gradient is None or isinstance(gradient, LandedGradient):
        return None
    return gradient.detach().cpu().float().clone()


def safe_get_local_optimizer_state(
    param: torch.Tensor, optim_state_key: str
) -> torch.Tensor | None:
    """Return this rank's elements of a state, or None before the first step."""
    name = _MASTER if optim_state_key == _FP32 else optim_state_key
    optimizer = optimizer_of(param)
    optimizer.wait()
    member = optimizer._kept().find(param)  # noqa: SLF001  # no public way reads one parameter's
    if member is None or param not in optimizer.state:
        return None
    _check_name(name, member.family.states)
    there = optimizer.state[param].get(name)
    if there is not None and not isinstance(there, StateOnDisk):
        return own_of(there).detach().clone()
    read = optimizer._states().read([member.number])[member.number]  # noqa: SLF001
    return in_shape_of(shard_of(param), read)[name]


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Let this rank's elements of the weight, and its master, be ``value``."""
    optimizer_of(param).wait()
    own = own_of(param)
    with torch.no_grad():
        own.copy_(value)
    if own.dtype != torch.float32:
        safe_set_local_optimizer_state(param, value, _MASTER)


def safe_set_local_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Let this rank's elements of a state be ``value``, from the next step on."""
    name = _MASTER if optim_state_key == _FP32 else optim_state_key
    optimizer = optimizer_of(param)
    optimizer.wait()
    member = optimizer._kept().find(param)  # noqa: SLF001
    if member is not None:
        _check_name(name, member.family.states)
    entry = optimizer.state[param]
    entry.setdefault("step", as_step(0))
    entry[name] = value.detach().to("cpu", torch.float32).clone()


def _check_name(name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        message = f"A state {name!r} was asked for: this parameter has {', '.join(known)}."
        raise OptionError(message)


def _like(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if value.shape != param.shape:
        message = (
            f"A value of shape {tuple(value.shape)} was given for a parameter of shape"
            f" {tuple(param.shape)}: give the whole one, on every rank."
        )
        raise OptionError(message)
    return value
