"""Tries a class on small tensors: may it be stepped piece by piece?

A net, and not a proof: a class must be known, or declared, to be per parameter to come here.
"""

import itertools
import random
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from math import nan
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from tensorstow.base.errors import OptimizerError, OptionError, StowError
from tensorstow.optim.generic.packing import refuse_unsliced
from tensorstow.optim.generic.partition import VECTOR
from tensorstow.optim.generic.shared_values import (
    OF_PARAMETERS,
    PLAIN_LOOP,
    SharedValues,
    StepBatch,
    copied,
    options_of,
    same,
    same_bits,
)
from tensorstow.optim.generic.stepper import Stepper

_SCALES = (1.0, 1e-3, 0.1, 1e-6, 3.0, 10.0, 1e-2, 1e2, 1e-4, 1e3, nan, 1.0)
"""Sizes of the gradients, step by step; at NaN one element of one of them is."""
_WITHOUT_ONE = 11
"""The step in which one parameter has no gradient, the last: a class may not look for that."""
_SCHEDULED = 6
"""The step from which each group has another learning rate."""
_AWAY_AND_BACK = 5
"""The step before which schedule-free classes are switched to eval mode and back."""
_LEAST_SIDE, _SIDES = 3, 12

_Entries = dict[tuple[int, int], dict[str, Any]]


def probe(
    optimizer_class: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    elementwise: bool,
) -> None:
    """Step all parameters, small, together and apart; raise OptionError if results differ.

    Catches classes that keep something over all parameters (a count, a norm, an estimate): stepped
    one parameter at a time they would go wrong in silence.
    """
    small = _shrunk(groups)
    # The user's sequence of random numbers must not depend on the trial.
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _compare(optimizer_class, small, options, sliced=False)
        if elementwise:
            # One parameter of four vectors for each group, which ``_Apart`` cuts after the first.
            flat = [
                {**group, "params": [torch.empty(4 * VECTOR).requires_grad_()]} for group in small
            ]
            for group in flat:
                if "param_names" in group:
                    group["param_names"] = group["param_names"][:1]
            _compare(optimizer_class, flat, options, sliced=True)


def _compare(
    optimizer_class: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    sliced: bool,
) -> None:
    together = _Together.over(optimizer_class, _filled(groups), options)
    filled = _filled(groups)
    apart = _Apart(Stepper(optimizer_class, filled, options), filled, sliced=sliced)
    # Schedule-free classes refuse a step before ``train()``.
    _change_mode("train", together, apart, 0)
    for step, scale in enumerate(_SCALES):
        if step == _AWAY_AND_BACK:
            for mode in ("eval", "train"):
                _change_mode(mode, together, apart, step)
        for trial in (together, apart):
            _give_gradients(trial.groups, step, scale)
            if step == _SCHEDULED:
                _schedule(trial.groups)
        with _no_random_numbers(optimizer_class):
            if not _step_both(together, apart, step, finite=scale == scale):  # noqa: PLR0124
                break
        _refuse_difference(together, apart, step)
    _refuse_more_to_save(together.optimizer)


class _Together:
    """The class itself, over all parameters."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.groups: list[dict[str, Any]] = optimizer.param_groups

    @classmethod
    def over(
        cls,
        optimizer_class: type[Optimizer],
        groups: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> "_Together":
        try:
            optimizer = optimizer_class([_as_given(group) for group in groups], **options)
        except Exception as error:
            raise _failed(optimizer_class, error) from error
        for group in optimizer.param_groups:
            group.update({name: False for name in PLAIN_LOOP if name in group})
        return cls(optimizer)

    def call(self, method: str) -> None:
        getattr(self.optimizer, method)()

    def entry(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        entry: Mapping[str, Any] = self.optimizer.state.get(parameter, {})
        return entry

    def values(self) -> SharedValues:
        return SharedValues.of(self.optimizer)


class _Apart:
    """The class as it is stowed: one parameter, or slice of one, after the other."""

    def __init__(
        self, stepper: Stepper, groups: Sequence[Mapping[str, Any]], *, sliced: bool
    ) -> None:
        self.stepper, self.sliced = stepper, sliced
        self.groups: list[dict[str, Any]] = [
            {**options, **_of_parameters(group)}
            for options, group in zip(stepper.group_options, groups, strict=True)
        ]
        self.entries: _Entries = {}
        self.state: dict[Any, Any] = dict(stepper.first_state)

    def call(self, method: str) -> None:
        is_step = method == "step"
        if not is_step and not self.stepper.changes_mode(self.groups, self.state, method):
            return
        with self.stepper.split_step(self.groups, self.state, method):
            for group, name, parameter in _named_parameters(self.groups):
                if parameter.grad is not None or not is_step:
                    self._step(group, name, parameter)

    def _step(self, group: Mapping[str, Any], name: str | None, tensor: torch.Tensor) -> None:
        cuts = (0, VECTOR, tensor.numel()) if self.sliced else (0, 0)
        for begin, end in itertools.pairwise(cuts):
            piece = tensor
            if self.sliced:
                piece = tensor.detach()[begin:end].requires_grad_()
                piece.grad = None if tensor.grad is None else tensor.grad[begin:end]
            entry = self.entries.get((id(tensor), begin))
            if entry is None:
                begins = self.stepper.begins_with_states
                entry = self.stepper.first_entry(group, piece, name) if begins else {}
            run = StepBatch(group, [(piece, entry)], None if name is None else [name])
            new_entry = self.stepper.run([run])[0][0]
            self.entries[id(tensor), begin] = new_entry
            if self.sliced:
                refuse_unsliced(new_entry, end - begin)

    def entry(self, parameter: torch.Tensor) -> Mapping[str, Any]:
        return self.entries.get((id(parameter), 0), {})

    def values(self) -> SharedValues:
        options = [options_of(group) for group in self.groups]
        return SharedValues(options, SharedValues.of(self.stepper.inner).attributes, self.state)


def _change_mode(mode: str, together: _Together, apart: _Apart, step: int) -> None:
    if not apart.stepper.has_mode(mode):
        return
    try:
        together.call(mode)
    except Exception as error:
        raise _failed(type(together.optimizer), error) from error
    apart.call(mode)
    _refuse_difference(together, apart, step)


def _step_both(together: _Together, apart: _Apart, step: int, *, finite: bool) -> bool:
    """Step both; return False if the class raises for gradients that are not finite."""
    optimizer_class = type(together.optimizer)
    try:
        together.call("step")
    except Exception as error:
        if finite and step != _WITHOUT_ONE:
            raise _failed(optimizer_class, error) from error
        return False
    try:
        apart.call("step")
    except OptimizerError as error:
        raise _failed(optimizer_class, error.__cause__ or error) from error
    return True


def _failed(optimizer_class: type[Optimizer], error: BaseException) -> StowError:
    if isinstance(error, StowError):
        return error
    message = (
        f"{optimizer_class.__name__} was tried out on small tensors and raised"
        f" {type(error).__name__}: {str(error).rstrip('.')}. It cannot be stowed, unless it works"
        " on them: step() without a closure, by gradients alone."
    )
    return OptionError(message)


def _refuse_difference(together: _Together, apart: _Apart, step: int) -> None:
    name = type(together.optimizer).__name__
    if differing := together.values().differences(apart.values()):
        message = (
            f"{name} has other values in {', '.join(differing)} when small tensors are stepped one"
            " after the other than together: the class keeps them for all parameters at once."
            " Use it as it is, un-stowed."
        )
        raise OptionError(message)
    pairs = zip(_parameters(together.groups), _parameters(apart.groups), strict=True)
    for p, q in pairs:
        alike = same_bits(p, q)
        if alike and not apart.sliced and p.grad is not None:
            alike = same(dict(together.entry(p)), dict(apart.entry(q)))
        if not alike:
            how = "in slices" if apart.sliced else "one after the other"
            advice = "Leave elementwise out" if apart.sliced else "Use it as it is, un-stowed"
            message = (
                f"{name} was tried out on small tensors, with gradients of size {_SCALES[step]:g}:"
                f" stepped {how}, their results differ from a step of all together. {advice}."
            )
            raise OptionError(message)


def _refuse_more_to_save(optimizer: Optimizer) -> None:
    """Raise OptionError if the class saves more than a stowed one's ``state_dict`` has."""
    try:
        more = optimizer.state_dict().keys() - {"state", "param_groups"}
    except Exception as error:
        raise _failed(type(optimizer), error) from error
    if more:
        message = (
            f"{type(optimizer).__name__} saves {', '.join(sorted(map(str, more)))} in a state_dict"
            " of its own, next to state and param_groups: stowed, they would be lost from"
            " checkpoints. Use it as it is, un-stowed."
        )
        raise OptionError(message)


@contextmanager
def _no_random_numbers(optimizer_class: type[Optimizer]) -> Iterator[None]:
    """Raise OptionError if random numbers are drawn: their order would change."""
    before = _random_states()
    yield
    if not same(before, _random_states()):
        message = (
            f"{optimizer_class.__name__} draws random numbers in a step: stepped one after"
            " the other, parameters would get different ones. Use it as it is, un-stowed."
        )
        raise OptionError(message)


def _random_states() -> list[Any]:
    numpys = np.random.get_state(legacy=False)  # noqa: NPY002  # read only
    return [torch.get_rng_state(), random.getstate(), repr(numpys)]


def _shrunk(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups with small parameters in place of theirs, at least two.

    Equal sizes stay equal and larger ones larger, so that what is square, tall or wide stays so.
    """
    sizes = {size for p in _parameters(groups) for size in _shape(p) if size > 1}
    count = len(sizes)
    side = {
        size: _LEAST_SIDE + (index if count <= _SIDES else index * _SIDES // count)
        for index, size in enumerate(sorted(sizes))
    }
    small = [_small(group, side) for group in groups]
    if not any(p.requires_grad for p in _parameters(small)):  # all are frozen, for now
        for p in _parameters(small):
            p.requires_grad_(p.is_floating_point())
    trained = [(g, p) for g in small for p in g["params"] if p.requires_grad]
    if len(trained) == 1:
        group, alone = trained[0]
        group["params"].append(torch.empty_like(alone).requires_grad_())
        if "param_names" in group:
            group["param_names"].append(f"{group['param_names'][0]}.twin")
    return small


def _small(group: Mapping[str, Any], side: Mapping[int, int]) -> dict[str, Any]:
    """Return a copy of a group with small parameters of at most ``side`` in each dimension."""
    params = [
        torch.empty([side.get(size, size) for size in _shape(p)], dtype=p.dtype).requires_grad_(
            p.requires_grad
        )
        for p in group["params"]
    ]
    options: dict[str, Any] = copied({k: v for k, v in group.items() if k != "params"})
    return {**options, "params": params}


def _filled(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            **copied({k: v for k, v in group.items() if k != "params"}),
            "params": [
                _random(p, generator).requires_grad_() if p.requires_grad else torch.zeros_like(p)
                for p in group["params"]
            ],
        }
        for group in groups
    ]


def _give_gradients(groups: Sequence[Mapping[str, Any]], step: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(2 + step)
    trained = [p for p in _parameters(groups) if p.requires_grad]
    for index, parameter in enumerate(trained):
        parameter.grad = _random(parameter, generator)
        # Each has another size, so that only one of them passes a limit.
        size = 1.0 if scale != scale else scale  # noqa: PLR0124  # NaN
        parameter.grad.mul_(size * 10.0 ** -((index - step) % min(4, len(trained))))
    if trained and scale != scale and trained[0].numel():  # noqa: PLR0124
        last = trained[-1].grad
        if last is not None and last.numel():
            last.view(-1)[0] = nan
    if step == _WITHOUT_ONE and len(trained) > 1:
        trained[0].grad = None


def _schedule(groups: Sequence[MutableMapping[str, Any]]) -> None:
    for number, group in enumerate(groups):
        if isinstance(group.get("lr"), float):
            group["lr"] *= 0.5 ** (number + 1)


def _shape(parameter: torch.Tensor) -> Sequence[int]:
    return () if torch.nn.parameter.is_lazy(parameter) else parameter.shape


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _as_given(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group as a user passes it, with (name, parameter) pairs."""
    plain = {k: v for k, v in group.items() if k != "param_names"}
    if "param_names" not in group:
        return plain
    return {**plain, "params": list(zip(group["param_names"], group["params"], strict=True))}


def _of_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: group[k] for k in OF_PARAMETERS if k in group}


def _named_parameters(
    groups: Sequence[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], str | None, torch.Tensor]]:
    for group in groups:
        names: Sequence[str | None] = group.get("param_names") or [None] * len(group["params"])
        for name, parameter in zip(names, group["params"], strict=True):
            yield group, name, parameter


def _parameters(groups: Sequence[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    return (p for group in groups for p in group["params"])
