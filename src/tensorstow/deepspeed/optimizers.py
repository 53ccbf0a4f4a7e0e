"""Makes the optimizer of an engine: from the JSON, a function, or the user's own.

[Note: Other classes] Classes other than Adam and AdamW are stepped by ``StowedOptimizer``. What a
class is given again over the placed model are its groups, with all their keys, and the options that
its constructor has put into ``defaults``. Where that makes another object than the user's, it is
refused. With several ranks a rank has rows of a parameter (stages 1 to 3), which an elementwise
class alone can step.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError, abbreviated
from tensorstow.base.update_on import Overlap, timing_of
from tensorstow.deepspeed.config.settings import Named, Settings
from tensorstow.deepspeed.config.values import arguments_of
from tensorstow.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from tensorstow.deepspeed.ops.adam import set_bias_correction
from tensorstow.deepspeed.ops.lion import Lion
from tensorstow.formats.state_format import StateFormat
from tensorstow.fsdp.optimizer_factory import (
    IMPLEMENTATION,
    Groups,
    Make,
    groups_of,
    names_of,
    with_groups,
)
from tensorstow.optim.adam import Adam, AdamW
from tensorstow.optim.generic.known_classes import ELEMENTWISE, WHOLE, is_listed, refuse_class
from tensorstow.optim.generic.shared_values import own_values, same
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer
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
    if callable(optimizer) and not isinstance(optimizer, Optimizer):
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
    if not isinstance(optimizer, Optimizer):
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


_TESTED = frozenset({torch.optim.Adagrad, Lion})
"""Classes besides Adam and AdamW that upstream takes under ZeRO by default."""
_MATRICES = frozenset({torch.optim.Muon})
"""Upstream's "Muon" is Adam for tensors other than matrices; torch's is not."""
_BY_NAME = {"adagrad": torch.optim.Adagrad, "lion": Lion}
_OF_SCHEDULERS = frozenset({"step", "_opt_called", "_step_count"})
"""Attributes that schedulers of torch give an optimizer."""


def _nothing() -> None:
    """Return None: no object is replaced."""


@dataclass(frozen=True, eq=False, slots=True)
class OtherMaker:
    """Makes a ``StowedOptimizer`` of a class over a placed model."""

    optimizer_class: type[Optimizer]
    options: Mapping[str, Any]
    groups: Groups
    """Groups with the parameters' names."""
    allows_untested: bool = False
    """Whether the configuration declares that a class may be used."""
    by_rows: bool = False
    """Whether ranks have rows of parameters."""
    replaces: Callable[[], Optimizer | None] = _nothing
    """Returns the user's object while it is alive."""

    def __call__(self, named: Any, **placement: Any) -> StowedOptimizer:
        """Make the optimizer over named parameters, as ``stow`` calls it."""
        for name in ("module", "durability"):  # it neither waits for weights nor commits
            placement.pop(name, None)
        placement.setdefault("states", "host")
        before = self.replaces()
        if before is not None:
            before.state.clear()  # of the model as it was
        make = partial(
            StowedOptimizer,
            self.optimizer_class,
            elementwise=self.optimizer_class is Lion
            or (self.by_rows and self.optimizer_class not in ELEMENTWISE),
            per_parameter=self.allows_untested,
            **self.options,
        )
        return with_groups(make, self.groups)(named, **placement)

    def for_settings(
        self, settings: Settings, ranks: int, overlap: Overlap | None, device: torch.device
    ) -> "OtherMaker":
        """Return the maker for a configuration; raises OptionError if the class does not fit."""
        name, zero = self.optimizer_class.__name__, settings.zero
        timing = timing_of(overlap or "none")
        is_known = self.optimizer_class in {*ELEMENTWISE, *WHOLE, Lion}
        is_known = is_known or is_listed(self.optimizer_class)
        tested = not zero.stage or self.optimizer_class in _TESTED
        if not settings.allows_untested_optimizer and not (is_known and tested):
            message = (
                f"{name} was given under ZeRO stage {zero.stage}: write"
                ' "zero_allow_untested_optimizer": true to use it, if no parameter is updated by'
                " another one's gradient or state."
            )
            raise OptionError(message)
        of_adam = {
            '"bf16"': settings.bf16,
            '"fp16"': settings.fp16 is not None,
            'offload_param.device="nvme"': zero.offload_param.device == "nvme",
            timing.keyword: timing.is_overlapped,
            f"an accelerator ({device})": device.type != "cpu",
        }
        for setting, is_set in of_adam.items():
            if is_set:
                message = (
                    f"{name} was given with {setting}, which is for Adam and AdamW: other classes"
                    " step fp32 parameters in host memory, in step(). Leave one of both out"
                    + (' ("torch_autocast" computes in bf16).' if "6" in setting else ".")
                )
                raise OptionError(message)
        by_rows = zero.stage > 0 and ranks > 1 and zero.mics_shard_size != 1
        if by_rows and self.optimizer_class in WHOLE:
            message = (
                f"{name} was given under ZeRO stage {zero.stage} with {ranks} ranks: it needs whole"
                " matrices, and a rank has some of their rows. Use stage 0, one rank, or an"
                " elementwise class (SGD, Adagrad, Lion, RMSprop, ...)."
            )
            raise OptionError(message)
        declared = settings.allows_untested_optimizer or is_known
        return replace(self, allows_untested=declared, by_rows=by_rows)


def of_named_class(named: Named, model: nn.Module, groups: Groups) -> OtherMaker:
    """Return the maker of the class that a type in the JSON names: torch's, or Lion.

    Raises OptionError for an unknown type, and for parameters that the class refuses.
    """
    optimizer_class = _BY_NAME.get(named.type.lower(), getattr(torch.optim, named.type, None))
    if (
        not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer))
        or optimizer_class in _MATRICES
    ):
        kind = abbreviated(named.type)
        message = (
            f'An optimizer of type {kind} was requested: a configuration may name "Adam", "AdamW",'
            ' "Adagrad", "Lion", or a class of torch.optim that steps any tensor, such as SGD. Use'
            " one of these, or pass an optimizer object."
        )
        raise OptionError(message)
    options = arguments_of(optimizer_class, named.params, "optimizer.params")
    options = {k: v for k, v in options.items() if k not in IMPLEMENTATION}
    if not options.pop("fp32_optimizer_states", True):
        message = (
            "optimizer.params.fp32_optimizer_states=false was given: states have the parameters'"
            " dtype, which is fp32. Leave it out."
        )
        raise OptionError(message)
    refuse_class(optimizer_class)
    tensors = [
        {**g, "params": [p[1] if isinstance(p, tuple) else p for p in g["params"]]} for g in groups
    ]
    # This raises what the class raises, before anything is placed.
    Stepper(optimizer_class, tensors, options)
    return OtherMaker(optimizer_class, options, names_of(model, groups))


def of_object(optimizer: Optimizer, model: nn.Module) -> OtherMaker:
    """Return what makes an optimizer like one that has not taken a step.

    Raises OptionError for one that has, and for one that its groups and defaults do not make.
    """
    kind = type(optimizer)
    if kind is DeepSpeedCPUAdagrad:
        kind = torch.optim.Adagrad  # the class that it extends, by the same groups
    refuse_class(kind)
    if any(not _is_first(entry) for entry in optimizer.state.values()):
        message = (
            f"{kind.__name__} was given with states of steps that it has taken, of the model before"
            " it was placed. Pass a new one, and call load_state_dict() of the one returned."
        )
        raise OptionError(message)
    # Steps go by the plain loop over tensors, and the placed model has names of its own.
    groups = [
        {k: v for k, v in g.items() if k not in {*IMPLEMENTATION, "param_names"}}
        for g in optimizer.param_groups
    ]
    taken = inspect.signature(kind).parameters
    options = {
        name: value
        for name, value in optimizer.defaults.items()
        if name in taken and name not in IMPLEMENTATION
    }
    _refuse_more(optimizer, Stepper(kind, groups, options).inner)
    return OtherMaker(kind, options, names_of(model, groups), replaces=weakref.ref(optimizer))


def _is_first(entry: object) -> bool:
    """Return whether a constructor created an entry of ``state`` (Adagrad's does)."""
    return isinstance(entry, dict) and "step" in entry and not float(entry["step"])


def _refuse_more(optimizer: Optimizer, copy: Optimizer) -> None:
    """Raise OptionError if attributes of ``optimizer`` and its ``copy`` differ."""
    left_out = _OF_SCHEDULERS | {"defaults"}
    first = {k: v for k, v in own_values(optimizer).items() if k not in left_out}
    second = {k: v for k, v in own_values(copy).items() if k not in left_out}
    names = [n for n in {**first, **second} if not same(first.get(n), second.get(n))]
    if names:
        message = (
            f"{type(optimizer).__name__} has {', '.join(sorted(names))} of its own, and is created"
            " again over the placed model by its groups and defaults, which lack them. Use"
            " tensorstow.stow() with a function that returns a StowedOptimizer."
        )
        raise OptionError(message)
