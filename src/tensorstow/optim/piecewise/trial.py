"""Whether a class may be stepped piece by piece: known, or tried out on small tensors."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError
from tensorstow.optim.piecewise.cuts import VECTOR
from tensorstow.optim.piecewise.entries import refuse_unsliced, tensors_in
from tensorstow.optim.piecewise.stepper import Run, Stepper

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""What becomes of an element depends on its own gradient and states, and on numbers that are the
same for all: large parameters may be stepped in pieces."""

WHOLE: frozenset[type[Optimizer]] = frozenset({torch.optim.Adafactor, torch.optim.Muon})
"""A parameter's elements depend on each other (norms, row and column sums, products)."""

_REFUSED = {
    torch.optim.LBFGS: "it evaluates its closure several times and keeps one state for all"
    " parameters together",
    torch.optim.SparseAdam: "it takes sparse gradients alone, and those are not taken here",
}

_Kept = dict[tuple[int, int], dict[str, Any]]

_STEPS = 3
_LONGEST_SIDE = 8


def refuse_class(optimizer_class: object) -> None:
    """Raise OptionError for what is no optimizer class, or one that cannot go piece by piece."""
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        message = (
            f"{optimizer_class!r} was given: the first argument is an optimizer class, such as"
            " torch.optim.SGD, and not an instance."
        )
        raise OptionError(message)
    if optimizer_class.__module__.split(".")[0] == "tensorstow":
        message = f"{optimizer_class.__name__} stows its states already: use it as it is."
        raise OptionError(message)
    for refused, reason in _REFUSED.items():
        if issubclass(optimizer_class, refused):
            message = (
                f"{optimizer_class.__name__} cannot be stowed: {reason}. Use it as it is, or"
                " another optimizer."
            )
            raise OptionError(message)


def try_out(
    optimizer_class: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    elementwise: bool,
) -> None:
    """Step small tensors together and apart; raise OptionError where that is not the same.

    Catches classes that keep something over all parameters (a count, a norm, an estimate): stepped
    one parameter at a time they would go wrong in silence.
    """
    small = [_shrunk(group) for group in groups]
    with torch.random.fork_rng(devices=[]):
        _compare(optimizer_class, small, options, sliced=False)
        if elementwise:
            flat = [{**group, "params": [torch.empty(4 * VECTOR)]} for group in small]
            _compare(optimizer_class, flat, options, sliced=True)


def _compare(
    optimizer_class: type[Optimizer],
    groups: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any],
    *,
    sliced: bool,
) -> None:
    try:
        together, apart = (_filled(groups) for _ in range(2))
        plain = optimizer_class(together, **options)
        stepper = Stepper(optimizer_class, groups, options)
        before = _noted(plain)
        kept: _Kept = {}
        for step in range(_STEPS):
            _give_gradients(together, step)
            _give_gradients(apart, step)
            random_state = torch.get_rng_state()
            plain.step()
            changed = _changes(before, plain, random_state)
            for options_made, group in zip(stepper.group_options, apart, strict=True):
                for tensor in group["params"]:
                    _step_apart(stepper, options_made, tensor, kept, sliced=sliced)
    except OptionError:
        raise
    except Exception as error:
        message = (
            f"{optimizer_class.__name__} was tried out on small tensors and raised"
            f" {type(error).__name__}: {error} It cannot be stowed, unless it works on them."
        )
        raise OptionError(message) from error
    if changed:
        message = (
            f"{optimizer_class.__name__} changes {changed} in a step: something that is kept over"
            " all parameters goes wrong when they are stepped one after the other. Use it as it is."
        )
        raise OptionError(message)
    if not _same(together, apart):
        how = "in slices" if sliced else "one after the other"
        advice = "Leave elementwise out" if sliced else "Use it as it is"
        message = (
            f"{optimizer_class.__name__} was tried out on small tensors: stepped {how} they come"
            f" out other than stepped together. {advice}."
        )
        raise OptionError(message)


def _step_apart(
    stepper: Stepper,
    group: Mapping[str, Any],
    tensor: torch.Tensor,
    kept: _Kept,
    *,
    sliced: bool,
) -> None:
    cuts = (0, VECTOR, tensor.numel()) if sliced else (0, 0)
    for begin, end in itertools.pairwise(cuts):
        piece = tensor
        if sliced:
            piece = tensor.detach()[begin:end].requires_grad_()
            piece.grad = None if tensor.grad is None else tensor.grad[begin:end]
        key = (id(tensor), begin)
        kept[key] = stepper.run([Run(group, [(piece, kept.get(key, {}))])])[0][0]
        if sliced:
            refuse_unsliced(kept[key], end - begin)


def _shrunk(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the group with one or two of its parameters, small; twins where it has one."""
    parameters = [p for p in group["params"] if p.is_floating_point()][:2]
    small = [
        torch.empty([min(max(size, 1), _LONGEST_SIDE) for size in p.shape], dtype=p.dtype)
        for p in (parameters * 2)[:2]
    ]
    return {**group, "params": small}


def _filled(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {**group, "params": [_random(p, generator).requires_grad_() for p in group["params"]]}
        for group in groups
    ]


def _give_gradients(groups: Sequence[Mapping[str, Any]], step: int) -> None:
    generator = torch.Generator().manual_seed(2 + step)
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = _random(parameter, generator)


def _random(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, generator=generator).to(like.dtype)


def _noted(optimizer: Optimizer) -> dict[str, str]:
    """Return what the optimizer keeps beside its states, as text that changes with it."""
    noted = {f"self.{k}": repr(v) for k, v in vars(optimizer).items() if k not in _TORCHS}
    for number, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if name != "params":
                noted[f"param_groups[{number}][{name!r}]"] = repr(value)
    return noted


def _changes(before: Mapping[str, str], optimizer: Optimizer, random: torch.Tensor) -> str:
    now = _noted(optimizer)
    names = [name for name, text in now.items() if before.get(name) != text]
    names += [
        f"self.{name}"
        for name, value in vars(optimizer).items()
        if name not in _TORCHS and tensors_in(value)
    ]
    if not torch.equal(random, torch.get_rng_state()):
        names.append("the random numbers")
    return ", ".join(dict.fromkeys(names))


_TORCHS = frozenset(
    {
        "defaults",
        "param_groups",
        "state",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_need_device_dtype_check_for_fused",
    }
)
"""What torch.optim itself keeps in every optimizer."""


def _same(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]) -> bool:
    return all(torch.equal(p, q) for p, q in zip(_parameters(a), _parameters(b), strict=True))


def _parameters(groups: Sequence[Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    return (p for group in groups for p in group["params"])
