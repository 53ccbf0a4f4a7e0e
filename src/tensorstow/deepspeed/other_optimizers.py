"""Optimizers other than Adam and AdamW, which ``StowedOptimizer`` steps over a placed model.

[Note: Other classes] What a class is given again over the placed model are its groups, with all
their keys, and the options that its constructor has put into ``defaults``. Where that makes another
object than the user's, it is refused. With several ranks a rank has rows of a parameter (stages 1
to 3), which an elementwise class alone can step.
"""

import inspect
import weakref
from collections.abc import Callable, Mapping
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
from tensorstow.deepspeed.ops.lion import Lion
from tensorstow.fsdp.optimizer_factory import IMPLEMENTATION, Groups, names_of, with_groups
from tensorstow.optim.generic.known_classes import ELEMENTWISE, WHOLE, is_listed, refuse_class
from tensorstow.optim.generic.shared_values import own_values, same
from tensorstow.optim.generic.stepper import Stepper
from tensorstow.optim.generic.stowed_optimizer import StowedOptimizer

_TESTED = frozenset({torch.optim.Adagrad, Lion})
"""Classes besides Adam and AdamW that upstream takes under ZeRO by default."""
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


_MATRICES = frozenset({torch.optim.Muon})
"""Upstream's "Muon" is Adam for tensors other than matrices; torch's is not."""


def of_object(optimizer: Optimizer, model: nn.Module) -> OtherMaker:
    """Return what makes an optimizer like one that has not taken a step.

    Raises OptionError for one that has, and for one that its groups and defaults do not make.
    """
    kind = type(optimizer)
    if kind is DeepSpeedCPUAdagrad:
        kind = torch.optim.Adagrad
    refuse_class(kind)
    if any(not _is_first(entry) for entry in optimizer.state.values()):
        message = (
            f"{kind.__name__} was given with states of steps that it has taken, of the model before"
            " it was placed. Pass a new one, and call load_state_dict() of the one returned."
        )
        raise OptionError(message)
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
