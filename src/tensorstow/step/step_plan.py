"""``StepPlan``: the parameters of one step, with their hyper-parameters."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tensorstow.base.tiers import Tier
from tensorstow.formats.reference import adam_scalars
from tensorstow.states.native_pipeline import StepRow, can_update
from tensorstow.states.state_store import StateStore
from tensorstow.step import validation
from tensorstow.step.managed_param import ManagedParam, ParamUpdate, StepPlan, in_order_of
from tensorstow.step.param_table import ParamTable
from tensorstow.tensors.dtensor import gradient_in_order, gradient_of, in_order, order_of, shard_of
from tensorstow.tensors.placeholder import ConsumedGradient, StateOnDisk, refuse_used

Groups = list[dict[str, Any]]
States = Mapping[torch.Tensor, dict[str, Any]]
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: spreads consecutive numbers


def collect(
    groups: Groups,
    params: ParamTable,
    takes: Callable[[torch.Tensor], bool],
    *,
    backward_overlap: bool = False,
) -> tuple[list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Return (group, parameter, gradient) of this step, checked, and parameters without states.

    ``backward_overlap``: gradients may have been handed over already. Raises before anything is
    changed.
    """
    found = []
    new_params = []
    for group in groups:
        validation.check_hyper(group)
        validation.refuse_torch_keywords(group)
        for index, parameter in enumerate(group["params"]):
            gradient = gradient_of(parameter)
            param = params.find(parameter)
            if gradient is None:
                continue
            if isinstance(gradient, ConsumedGradient):
                if not backward_overlap:
                    refuse_used(name_of(groups, group, index))
                continue
            if param is None and not takes(parameter):
                continue
            shard = shard_of(parameter)
            if param is not None:
                param.shard = shard
            check_due(groups, group, index, param)
            if param is None:
                new_params.append(parameter)
            found.append((group, parameter, gradient_in_order(shard, gradient)))
    return found, new_params


def check_due(
    groups: Groups, group: dict[str, Any], index: int, param: ManagedParam | None
) -> None:
    """Raise for a parameter or a gradient that the kernels cannot take."""
    shard = shard_of(group["params"][index])
    parameter = in_order(shard, order_of(shard)) if param is None else param.parameter
    gradient = gradient_of(group["params"][index])
    amsgrad = bool(group["amsgrad"])
    if can_update(parameter, gradient) and (param is None or param.fits(amsgrad=amsgrad)):
        return
    name = name_of(groups, group, index)
    validation.check_parameter(parameter, name)
    if gradient is not None:
        validation.check_gradient(parameter, gradient, name)
    if param is not None:
        validation.refuse_change(parameter, group, param.family, param.numel, name)


def make_plan(
    updates: list[ParamUpdate], params: ParamTable, states: States, factor: float
) -> StepPlan:
    """Round the hyper-parameters once and lay out what the pipeline gets.

    ``factor`` multiplies gradients.
    """
    counts = [
        step_of(
            update.param,
            # A mapping that makes what it lacks must make nothing for a gradient that never comes.
            states[update.param.owner]
            if update.gradient is not None
            else states.get(update.param.owner, {}),
            params.store,
            begins=update.gradient is not None,
        )
        for update in updates
    ]
    rows = [_row_of_bystander(param) for param in params.all()]
    table: dict[tuple[int, float, float], int] = {}
    scalars: list[tuple[float, ...]] = []
    for update, count in zip(updates, counts, strict=True):
        key = (id(update.group), count.item() + 1.0, update.scale)
        if key not in table:
            table[key] = len(scalars)
            scalars.append(_scalar_row(update.group, int(key[1]), factor / update.scale))
        row = _row(update, params.store, table[key], int(key[1]))
        rows[update.param.number] = row
    return StepPlan(updates, counts, rows, np.array(scalars, dtype=np.float32).reshape(-1, 9))


def record_step(plan: StepPlan, states: States) -> None:
    """Count the step, and tell autograd that native code wrote to the weights.

    A stale graph would otherwise use the new ones.
    """
    if not plan.updates:
        return
    torch._foreach_add_(plan.counts, 1.0)
    torch.autograd.graph.increment_version([update.param.parameter for update in plan.updates])
    for update, count in zip(plan.updates, plan.counts, strict=True):
        state = states[update.param.owner]
        if "step" not in state:
            state.update({"step": count, **update.param.views})
        update.param.begun = True
        update.param.remember()
        if not plan.commits:
            update.param.leave_behind()


def step_of(
    param: ManagedParam, state: dict[str, Any], store: StateStore, *, begins: bool = True
) -> torch.Tensor:
    """Return the parameter's step count, and see to it that its states are what users see.

    A user may have emptied the state (a reset), or put other tensors in (a transplant). Where a
    gradient ``begins`` it, a parameter without states gets them.
    """
    step: torch.Tensor | None = state.get("step")
    if step is None:
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        if param.begun:
            store.put({param.number: {}})
            param.begun = False
    if not begins and not state:
        return step
    state["step"] = step
    param.begun = True
    placed = {k: v for k, v in state.items() if k in param.family.states}
    if any(placed.get(name) is not view for name, view in param.views.items()):
        _transplant(param, placed, store)
        for name in placed:
            del state[name]
        state.update(param.views)
    return step


def _transplant(param: ManagedParam, placed: Mapping[str, torch.Tensor], store: StateStore) -> None:
    """Take states that a user put in; those beside them stay what they were."""
    given = {name: s for name, s in placed.items() if not isinstance(s, StateOnDisk)}
    given = {name: in_order_of(param, s) for name, s in given.items()}
    if given and len(given) < len(placed):
        given = store.read([param.number])[param.number] | given
    if given:
        store.put({param.number: given})


def must_seed(param: ManagedParam, store: StateStore) -> bool:
    """Return whether someone else wrote the 16-bit weight that a master belongs to."""
    if param.family.dtype == torch.float32 or not param.written_by_others:
        return False
    with param.held():
        return not store.pipeline.unchanged(param.number, param.weight)


def name_of(groups: Groups, group: dict[str, Any], index: int) -> str:
    """Return what to call a parameter in a message."""
    if group.get("param_names"):
        return f"Parameter {group['param_names'][index]!r}"
    number = next(i for i, other in enumerate(groups) if other is group)
    return f"Parameter {index} of group {number}"


def as_step(step: torch.Tensor | float) -> torch.Tensor:
    """Return a step count as torch's optimizers keep it."""
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def scalars_of(
    updates: Iterable[ParamUpdate], counts: Sequence[torch.Tensor], factor: float
) -> list[Any]:
    """Return the hyper-parameters of each parameter's step, to be compared."""
    rows: dict[tuple[int, int], tuple[float, ...]] = {}
    found = []
    for update, count in zip(updates, counts, strict=True):
        key = (id(update.group), int(count.item() + 1.0))
        if key not in rows:
            rows[key] = _scalar_row(update.group, key[1], factor)
        found.append(rows[key])
    return found


def _row(update: ParamUpdate, store: StateStore, scalars: int, step: int) -> StepRow:
    param = update.param
    # What is not read where it is comes by the feed of its tier.
    gradient = update.gradient if param.tier is Tier.HOST else None
    # A function of the parameter and its step alone, so that a resumed run rounds alike.
    key = (step * _GOLDEN + param.number * (_GOLDEN >> 7)) & ((1 << 63) - 1)
    return StepRow(
        param.weight,
        gradient,
        must_seed(param, store),
        scalars,
        key,
        expected=gradient is None,
    )


def _row_of_bystander(param: ManagedParam) -> StepRow:
    """Name its weight alone: a commit takes that too."""
    return StepRow(weight=param.weight)


def _scalar_row(group: dict[str, Any], step: int, factor: float) -> tuple[float, ...]:
    return adam_scalars(
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        decoupled=bool(group["decoupled_weight_decay"]),
        bias_correction=bool(group.get("bias_correction", True)),
        grad_factor=-factor if group["maximize"] else factor,
    ).as_tuple()
