"""Counts the steps of parameters, and rounds the hyper-parameters of each."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tensorstow.formats.reference import AdamScalars, adam_scalars
from tensorstow.states.state_store import StateStore
from tensorstow.step.managed_param import ManagedParam, in_order_of
from tensorstow.tensors.placeholder import StateOnDisk

Groups = list[dict[str, Any]]
States = Mapping[torch.Tensor, dict[str, Any]]


def step_of(
    param: ManagedParam, state: dict[str, Any], store: StateStore, *, begins: bool = True
) -> torch.Tensor:
    """Return the parameter's step count, after applying the user's edits of its states.

    A user may have emptied the state (a reset), or put other tensors in (a transplant). If
    ``begins``, a parameter without states gets them: it has a gradient.
    """
    step: torch.Tensor | None = state.get("step")
    if step is None:
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        if param.begun:
            store.put({param.number: {}})
            param.begun = False
    # The gradient may never come, and states without a step are not shown.
    if not begins and not state:
        return step
    state["step"] = step
    param.begun = True
    # Without a generator: this runs for every parameter in every step.
    if not all(map(operator.is_, map(state.get, param.views), param.views.values())):
        placed = {k: v for k, v in state.items() if k in param.views}
        _transplant(param, placed, store)
        for name in placed:
            del state[name]
        state.update(param.views)
    return step


def _transplant(param: ManagedParam, placed: Mapping[str, torch.Tensor], store: StateStore) -> None:
    """Write states that the user has set to the store; others are unchanged."""
    tensors = {name: s for name, s in placed.items() if not isinstance(s, StateOnDisk)}
    tensors = {name: in_order_of(param, s) for name, s in tensors.items()}
    # ``put`` makes states zero that it is not given, so those that stay are read.
    if tensors and len(tensors) < len(placed):
        tensors = store.read([param.number])[param.number] | tensors
    if tensors:
        store.put({param.number: tensors})


def must_seed(param: ManagedParam, store: StateStore) -> bool:
    """Return whether others wrote the 16-bit weight that a master belongs to."""
    if param.family.dtype == torch.float32 or not param.written_by_others:
        return False
    # The stamp shows only that someone may have written: the bits decide.
    with param.held():
        return not store.pipeline.handle.live().unchanged(param.number, param.weight.data_ptr())


def name_of(groups: Groups, group: dict[str, Any], index: int) -> str:
    """Return a parameter's name for messages."""
    if group.get("param_names"):
        return f"Parameter {group['param_names'][index]!r}"
    number = next(i for i, other in enumerate(groups) if other is group)
    return f"Parameter {index} of group {number}"


def as_step(step: torch.Tensor | float) -> torch.Tensor:
    """Return a step count as torch's optimizers keep it."""
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def scalar_table(
    scaled_groups: Iterable[tuple[dict[str, Any], float]],
    steps: Sequence[int],
    factor: float,
) -> tuple[list[int], list[AdamScalars]]:
    """Return each update's row in the table of scalars, and the table: equal steps share a row.

    ``scaled_groups``: for each update its group, and the scale of its gradient. ``steps``: the
    number of each update's step, counted from 1.
    """
    rows: dict[tuple[int, int, float], int] = {}
    indices: list[int] = []
    scalars: list[AdamScalars] = []
    for (group, scale), step in zip(scaled_groups, steps, strict=True):
        key = (id(group), step, scale)
        row = rows.get(key)
        if row is None:
            row = rows[key] = len(scalars)
            scalars.append(scalar_row(group, step, factor / scale))
        indices.append(row)
    return indices, scalars


def scalar_row(group: dict[str, Any], step: int, factor: float) -> AdamScalars:
    """Return the numbers of a group's step, counted from 1; ``factor`` multiplies gradients."""
    return adam_scalars(
        lr=float(group["lr"]),
        betas=(float(group["betas"][0]), float(group["betas"][1])),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        decoupled=bool(group["decoupled_weight_decay"]),
        bias_correction=bool(group.get("bias_correction", True)),
        grad_factor=-factor if group["maximize"] else factor,
        ema_weight=ema_weight(group, step),
    )


def ema_weight(group: Mapping[str, Any], step: int) -> float:
    """Return the weight of a step's new weights in their average: 1 in the first, which copies."""
    decay = group.get("ema")
    return 1.0 if decay is None or step == 1 else 1.0 - float(decay)
