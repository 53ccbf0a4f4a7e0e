"""``deepspeed.utils.tensor_fragment``: whole fp32 weights, gradients and states of a parameter.

The ``full`` ones are collective: every rank is to call them. The ``local`` ones are of this rank's
elements. All of them wait for an update that is under way first.
"""

from collections.abc import Callable, Iterable

import torch

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.registry import optimizer_of, placed_of
from tensorstow.doorkit.keyword_table import Table, describes, honoured
from tensorstow.fsdp.full_tensors import full_tensor
from tensorstow.optim.placed import PlacedOptimizer
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.step.step_plan import as_step
from tensorstow.tensors.dtensor import gradient_of, part_of, to_local
from tensorstow.tensors.placeholder import ConsumedGradient
from tensorstow.tensors.shares import is_unreduced, share_of

_FP32 = "fp32"
_MASTER = "master"
_LOCAL: Table = {
    "param": honoured("A parameter of an engine."),
    "value": honoured("A tensor of the shard's shape."),
    "optim_state_key": honoured('"exp_avg", "exp_avg_sq", or "fp32" for the master weight.'),
}
_FULL: Table = {
    **_LOCAL,
    "param": honoured("A parameter of an engine. Call it on every rank."),
    "value": honoured("A tensor of the parameter's full shape, the same on every rank."),
}


@describes(_FULL)
def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's full fp32 weight, in host memory; None: it is not trained.

    Of a 16-bit parameter it is the master weight.
    """
    return _full(param, safe_get_local_fp32_param(param))


@describes(_FULL)
def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return a parameter's full gradient, as fp32 in host memory; None: there is no gradient.

    It is the sum so far, between ``backward`` and ``step``; under fp16 it is multiplied by the loss
    scale. One that is not reduced yet, as in ``no_sync()``, is this rank's own.

    Raises:
        OptionError: Updates run during backward, and this one has used the gradient.
    """
    param = placed_of(param)
    if share_of(param) is not None and param.grad is not None and is_unreduced(param.grad):
        return param.grad.detach().cpu().float().clone()
    return _full(param, safe_get_local_grad(param))


@describes(_FULL)
def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor | None:
    """Return a parameter's full state, as fp32 in host memory; None before the first step."""
    return _full(param, safe_get_local_optimizer_state(param, optim_state_key))


@describes(_FULL)
def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter's full fp32 weight, and the master weight of a 16-bit parameter.

    Raises:
        OptionError: The shape is another one.
    """
    param = placed_of(param)
    safe_set_local_fp32_param(param, _part(param, value))
    if share_of(param) is not None:  # whole on every rank
        with torch.no_grad():
            param.copy_(value)


@describes(_FULL)
def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set a parameter's full gradient, which exists between ``backward`` and ``step``.

    Under fp16 it is multiplied by the loss scale.

    Raises:
        OptionError: The shape is another one, or there is no gradient to set.
    """
    safe_set_local_grad(param, _part(param, value))


def safe_update_full_grad_vectorized(
    param_list: Iterable[torch.Tensor],
    update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    """Replace the full gradients of parameters, between ``backward`` and ``step``.

    Args:
        param_list: Parameters of an engine, the same on every rank; those without a gradient are
            left out.
        update_func: Takes a full fp32 gradient in host memory, and its parameter; returns the new
            gradient, the same on every rank.

    Raises:
        OptionError: A new gradient has another shape, or updates run during backward and have used
            one.
    """
    for param in param_list:
        gradient = safe_get_full_grad(param)
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


@describes(_FULL)
def safe_set_full_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set a parameter's full state, from the next step on.

    Raises:
        OptionError: The shape is another one, or the parameter has no such state.
    """
    safe_set_local_optimizer_state(param, _part(param, value), optim_state_key)


@describes(_LOCAL)
def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's shard of the fp32 weight; None: no group of the optimizer has it."""
    param = placed_of(param)
    optimizer = optimizer_of(param)
    if not _is_updated(optimizer, param):
        return None
    optimizer.wait([param])
    share = _own(param).detach().cpu()
    if share.dtype != torch.float32:
        master = safe_get_local_optimizer_state(param, _MASTER)
        # If the weight was written since, the next update starts from it, and so does the master.
        is_current = master is not None and torch.equal(master.to(share.dtype), share)
        return master if is_current else share.float()
    return share.clone()


@describes(_LOCAL)
def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's shard of the gradient, as fp32 in host memory; None: there is none.

    Raises:
        OptionError: Updates run during backward, and this one has used the gradient.
    """
    param = placed_of(param)
    gradient = gradient_of(param)
    if gradient is None:
        return None
    if isinstance(gradient, ConsumedGradient):
        message = (
            "A gradient was requested that its update has used: updates run during backward. Call"
            ' initialize(..., overlap="none") to read gradients between backward and step.'
        )
        raise OptionError(message)
    return gradient.detach().cpu().float().clone()


@describes(_LOCAL)
def safe_set_local_grad(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's shard of the gradient.

    Raises:
        OptionError: There is no gradient, or updates run during backward and have used it.
    """
    param = placed_of(param)
    gradient = gradient_of(param)
    if gradient is None or isinstance(gradient, ConsumedGradient):
        message = (
            "A gradient was to be set that is not there: it exists between backward and step,"
            ' unless updates run during backward (initialize(..., overlap="none")).'
        )
        raise OptionError(message)
    with torch.no_grad():
        gradient.copy_(value)


@describes(_LOCAL)
def safe_get_local_optimizer_state(
    param: torch.Tensor, optim_state_key: str
) -> torch.Tensor | None:
    """Return this rank's shard of a state, as fp32 in host memory; None before the first step.

    Raises:
        OptionError: The parameter has no such state.
    """
    param = placed_of(param)
    name = _MASTER if optim_state_key == _FP32 else optim_state_key
    optimizer = optimizer_of(param)
    optimizer.wait()
    states = optimizer.states_of(param)
    if not states:
        return None
    _check_name(name, tuple(states))
    value = states[name]
    return None if value is None else torch.as_tensor(value, dtype=torch.float32)


@describes(_LOCAL)
def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Set this rank's shard of the fp32 weight, and of the master weight of a 16-bit parameter."""
    param = placed_of(param)
    optimizer = optimizer_of(param)
    optimizer.wait()
    share = _own(param)
    with torch.no_grad():
        share.copy_(value)
    if share.dtype != torch.float32 and _is_updated(optimizer, param):
        safe_set_local_optimizer_state(param, value, _MASTER)


@describes(_LOCAL)
def safe_set_local_optimizer_state(
    param: torch.Tensor, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set this rank's shard of a state, from the next step on.

    Raises:
        OptionError: The parameter has no such state.
    """
    param = placed_of(param)
    name = _MASTER if optim_state_key == _FP32 else optim_state_key
    optimizer = optimizer_of(param)
    optimizer.wait()
    if not isinstance(optimizer, StowedAdam):
        states = optimizer.states_of(param) or {}
        _check_name(name, tuple(states))
        state = states[name]
        if isinstance(state, torch.Tensor):
            state.copy_(value)
        else:
            states[name] = type(state)(value.item())
        optimizer.state[param] = states
        return
    managed = optimizer._params().find(param)  # noqa: SLF001
    if managed is not None:
        _check_name(name, managed.family.states)
    entry = optimizer.state[param]
    entry.setdefault("step", as_step(0))
    entry[name] = value.detach().to("cpu", torch.float32).clone()


def _own(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a parameter, to read and to write."""
    share = share_of(param)
    return to_local(param) if share is None else share.rows(param)


def _is_updated(optimizer: PlacedOptimizer, param: torch.Tensor) -> bool:
    """Return whether an optimizer has states of a parameter, or would have."""
    if isinstance(optimizer, StowedAdam):
        return optimizer._params().find(param) is not None  # noqa: SLF001
    return optimizer.states_of(param) is not None


def _check_name(name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        listed = ", ".join(names) or "none before its first step"
        message = f"A state {name!r} was requested: this parameter has {listed}."
        raise OptionError(message)


def _full(param: torch.Tensor, share: torch.Tensor | None) -> torch.Tensor | None:
    """Return a full tensor from each rank's share of it; collective."""
    return None if share is None else full_tensor(share, placed_of(param))


def _part(param: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a full value of a parameter."""
    param = placed_of(param)
    if value.shape != param.shape:
        message = (
            f"A value of shape {tuple(value.shape)} was given for a parameter of shape"
            f" {tuple(param.shape)}: pass the full value, on every rank."
        )
        raise OptionError(message)
    return part_of(value, param, "The value")
