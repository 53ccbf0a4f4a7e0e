"""Recreates over a placed model an optimizer that was created before the placement.

[Note: Made before] ``stow`` replaces a model's tensors, so an optimizer over the old ones updates
nothing. Its groups are kept by parameter name with all their keys, because LR schedulers store
values in them ("initial_lr", "max_lr"). LR schedulers of the old optimizer, nested ones included,
are moved to the new one.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tensorstow.base.errors import OptionError
from tensorstow.optim.placed import PlacedOptimizer, PlacedOptimizerT

Make = Callable[..., PlacedOptimizer]
"""An optimizer factory: ``stow`` calls it with named parameters and options of the placement."""
Groups = list[dict[str, Any]]
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
"""Keys of groups that select torch's kernels."""


def groups_of(optimizer: Optimizer) -> Groups:
    """Return copies of an optimizer's groups, without the keys that select torch's kernels.

    Raises OptionError if it has taken steps: its states belong to the old parameters.
    """
    if optimizer.state:
        message = (
            "An optimizer that has taken steps was given: its states belong to the model before it"
            " was placed. Give a new one, and call load_state_dict() of the one returned."
        )
        raise OptionError(message)
    left_out = {*IMPLEMENTATION, "param_names"}
    return [{k: v for k, v in g.items() if k not in left_out} for g in optimizer.param_groups]


def names_of(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> Groups:
    """Return groups with the model's names in place of its parameters, which may be named ones.

    Raises OptionError if a parameter is not the model's.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    renamed: Groups = []
    for group in groups:
        own_names = [names.get(id(p[1] if isinstance(p, tuple) else p)) for p in group["params"]]
        if None in own_names:
            message = (
                f"Parameter {own_names.index(None)} of a group is not one of the model's, and only"
                " the model is placed. Give model.parameters(), or groups of them."
            )
            raise OptionError(message)
        renamed.append({**group, "params": own_names})
    return renamed


def with_groups(
    make: Callable[..., PlacedOptimizerT], groups: Groups
) -> Callable[..., PlacedOptimizerT]:
    """Return a factory for ``stow`` of optimizers with groups that ``names_of`` returned.

    ``make`` is called with groups of named parameters and the keywords that place the states.
    """

    def factory(
        named: Iterable[tuple[str, torch.Tensor]],
        **placement: Any,  # noqa: ANN401
    ) -> PlacedOptimizerT:
        by_name = dict(named)
        placed = [{**g, "params": [(n, by_name[n]) for n in g["params"]]} for g in groups]
        for group in placed:
            if not group["params"]:  # torch takes the names from the parameters, if there are any
                group["param_names"] = []
        return make(placed, **placement)

    return factory


def move_schedule(schedule: Any, optimizer: Optimizer) -> None:  # noqa: ANN401  # torch's, or alike
    """Move an LR scheduler of torch's, and those inside it, to an optimizer with the same groups.

    For any other object only its ``optimizer`` is replaced, if it has one.
    """
    attached = [
        s for s in _schedules(schedule) if isinstance(getattr(s, "optimizer", None), Optimizer)
    ]
    if not attached:
        return
    rates = [(group["lr"], dict(group)) for group in optimizer.param_groups]
    # torch warns unless step() is patched by a scheduler: creating one patches it.
    LambdaLR(optimizer, lambda _: 1.0)
    # LambdaLR has set both entries: the groups get back what they had.
    for group, (rate, before) in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
        if "initial_lr" not in before:
            del group["initial_lr"]
    for scheduler in attached:
        scheduler.optimizer = optimizer


def _schedules(schedule: Any) -> Iterator[Any]:  # noqa: ANN401
    """Yield a scheduler and those inside it, as SequentialLR and ChainedScheduler have them."""
    yield schedule
    for inside in getattr(schedule, "_schedulers", ()):
        yield from _schedules(inside)
