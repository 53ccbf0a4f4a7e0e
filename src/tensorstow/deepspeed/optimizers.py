"""Makes the optimizer of an engine: from the JSON, a function, or the user's own."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.deepspeed.config.settings import Named
from tensorstow.deepspeed.config.values import arguments_of
from tensorstow.deepspeed.ops.adam import set_bias_correction
from tensorstow.deepspeed.other_optimizers import of_named_class, of_object
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.optimizer_factory import Groups, Make, groups_of, names_of, with_groups
from tensorstow.optim.adam import Adam, AdamW
from tensorstow.optim.stowed_adam import StowedAdam

_TAKEN = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_OF_TORCH = (torch.optim.Adam, torch.optim.AdamW)
_OF_IMPLEMENTATIONS = (
    *("adam_w_mode", "torch_adam", "bias_correction", "fp32_optimizer_states"),
    *("fused", "foreach"),  # of torch's: how it computes the same
)


_NAMED = {"adam", "adamw"}
_EXACT = {None, StateFormat.SPLIT, StateFormat.FP32}


def maker_of(
    named: Named | None,
    optimizer: object,
    model: nn.Module,
    model_parameters: Iterable[Any] | None = None,
) -> Make | None:
    """Return a function that creates the optimizer over a placed model's named parameters.

    ``optimizer`` is one of torch's or tensorstow's, whose class and groups are used; a class of
    tensorstow's, or a function that takes ``(named, **placement)``; a function of
    ``model_parameters`` that returns one of torch's; or None for ``named``, the one of the JSON:
    None of both, and it returns None.
    Raises OptionError for anything else.
    """
    if optimizer is None:
        if named is None:
            return None
        groups = _groups(model, model_parameters)
        if named.type.lower() not in _NAMED:
            return of_named_class(named, model, groups)
        return with_groups(of_named(named), names_of(model, groups))
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        if _takes_placement(optimizer):
            return with_groups(optimizer, names_of(model, _groups(model, model_parameters)))
        optimizer = optimizer(_groups(model, model_parameters))
    return _like_made(optimizer, model)


def of_named(named: Named) -> Make:
    """Return the Adam that a type and parameters in the JSON mean, as DeepSpeed reads them.

    "Adam" is AdamW unless ``adam_w_mode`` is false. ``weight_decay`` defaults to 0, or to 0.01
    where ``torch_adam`` selects torch's AdamW.
    """
    kind = named.type.lower()
    params = arguments_of(Adam, named.params, "optimizer.params", _OF_IMPLEMENTATIONS)
    if "max_grad_norm" in params:
        message = (
            "optimizer.params.max_grad_norm was given: write it as gradient_clipping, outside of"
            " the section optimizer."
        )
        raise OptionError(message)
    unknown = sorted(params.keys() - {*_TAKEN, *_OF_IMPLEMENTATIONS})
    if unknown:
        names = ", ".join((*_TAKEN, *_OF_IMPLEMENTATIONS))
        message = f'{", ".join(unknown)} was given to "{named.type}", which takes {names}.'
        raise OptionError(message)
    decoupled = kind == "adamw" or bool(params.get("adam_w_mode", True))
    keywords = {name: params[name] for name in _TAKEN if name in params}
    keywords.setdefault("weight_decay", 0.01 if decoupled and params.get("torch_adam") else 0.0)
    corrected = bool(params.get("bias_correction", True))

    def make(params: Any, **placement: Any) -> StowedAdam:
        optimizer = (AdamW if decoupled else Adam)(params, **keywords, **placement)
        set_bias_correction(optimizer, bias_correction=corrected)
        return optimizer

    return make


def _like_made(optimizer: object, model: nn.Module) -> Make:
    """Return a function that creates an optimizer like one that has not taken a step."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        message = (
            f"optimizer={type(optimizer).__name__} was given: it must be an optimizer of torch or"
            " tensorstow, or a function that returns one."
        )
        raise OptionError(message)
    if not isinstance(optimizer, StowedAdam) and type(optimizer) not in _OF_TORCH:
        return of_object(optimizer, model)
    groups = groups_of(optimizer)
    if isinstance(optimizer, StowedAdam) and optimizer.offload_policy.format not in _EXACT:
        message = (
            f'An optimizer with state_format="{optimizer.offload_policy.format}" was given:'
            " initialize() keeps states exactly. Leave the format out, or place the model with"
            " tensorstow.stow() and partial(tensorstow.AdamW, state_format=...)."
        )
        raise OptionError(message)
    named_groups = names_of(model, groups)
    if isinstance(optimizer, StowedAdam):
        optimizer.close()  # the optimizer over the placed model takes its place
    decoupled = all(g["decoupled_weight_decay"] for g in named_groups)
    return with_groups(AdamW if decoupled else Adam, named_groups)


def _groups(model: nn.Module, params: Iterable[Any] | None) -> Groups:
    """Return the user's groups; without any, one group of all trainable parameters."""
    if params is None:
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    listed = list(params)
    if listed and isinstance(listed[0], dict):
        return [{**g, "params": _listed(g["params"])} for g in listed]
    return [{"params": [p[1] if isinstance(p, tuple) else p for p in listed]}]


def _listed(params: object) -> list[Any]:
    if isinstance(params, torch.Tensor):
        return [params]
    return list(params) if isinstance(params, Iterable) else [params]


def _takes_placement(make: Callable[..., Any]) -> bool:
    try:
        taken = inspect.signature(make).parameters
    except ValueError:  # a built-in function takes no keywords of ours
        return False
    return "module" in taken or any(p.kind == p.VAR_KEYWORD for p in taken.values())
