"""One step of an optimizer: who takes part in it, and with which numbers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tensorstow.formats.reference import adam_scalars
from tensorstow.states.native_pipeline import StepRow
from tensorstow.states.state_store import StateStore
from tensorstow.step import validation
from tensorstow.step.param_table import Member, Members, in_order_of
from tensorstow.tensors.consumed_gradient import LandedGradient, refuse_used
from tensorstow.tensors.dtensor import gradient_in_order, gradient_of, in_order, order_of, shard_of
from tensorstow.tensors.on_disk import StateOnDisk

Groups = list[dict[str, Any]]
States = Mapping[torch.Tensor, dict[str, Any]]
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: spreads consecutive numbers


@dataclass(frozen=True, slots=True)
class Due:
    """A parameter that has a gradient in this step."""

    group: dict[str, Any]
    member: Member
    gradient: torch.Tensor | None
    """Contiguous; None where it is still to come."""
    scale: float = 1.0
    """By which the update divides it ([Note: Unscaling])."""

    @property
    def on_host(self) -> torch.Tensor | None:
        """Return the gradient where the kernel can read it, else None."""
        lent = self.member.lessor is not None
        return None if lent or self.member.mirror is not None else self.gradient


@dataclass(slots=True)
class Turn:
    """One step: what the pipeline gets, and what must stay alive until it is published."""

    dues: list[Due]
    counts: list[torch.Tensor]
    """Each parameter's step count, before this step."""
    rows: list[StepRow]
    scalars: npt.NDArray[np.float32]
    commits: bool = False


def collect(
    groups: Groups,
    kept: Members,
    takes: Callable[[torch.Tensor], bool],
    *,
    beside_backward: bool = False,
) -> tuple[list[tuple[dict[str, Any], torch.Tensor, torch.Tensor]], list[torch.Tensor]]:
    """Return (group, parameter, gradient) of this step, checked, and parameters without states.

    ``beside_backward``: gradients may have been handed over already. Raises before anything is
    changed.
    """
    due = []
    strangers = []
    for group in groups:
        validation.check_hyper(group)
        validation.refuse_torch_keywords(group)
        for index, parameter in enumerate(group["params"]):
            gradient = gradient_of(parameter)
            member = kept.find(parameter)
            if gradient is None:
                continue
            if isinstance(gradient, LandedGradient):
                if not beside_backward:
                    refuse_used(name_of(groups, group, index))
                continue
            if member is None and not takes(parameter):
                continue
            shard = shard_of(parameter)
            if member is not None:
                member.shard = shard
            check_due(groups, group, index, member)
            if member is None:
                strangers.append(parameter)
            due.append((group, parameter, gradient_in_order(shard, gradient)))
    return due, strangers


def check_due(groups: Groups, group: dict[str, Any], index: int, member: Member | None) -> None:
    """Raise for a parameter or a gradient that the kernels cannot take."""
    shard = shard_of(group["params"][index])
    parameter = in_order(shard, order_of(shard)) if member is None else member.parameter
    gradient = gradient_of(group["params"][index])
    amsgrad = bool(group["amsgrad"])
    if validation.fits(parameter, gradient) and (member is None or member.fits(amsgrad=amsgrad)):
        return
    name = name_of(groups, group, index)
    validation.check_parameter(parameter, name)
    if gradient is not None:
        validation.check_gradient(parameter, gradient, name)
    if member is not None:
        validation.refuse_change(parameter, group, member.family, member.numel, name)


def make_turn(dues: list[Due], kept: Members, states: States, factor: float) -> Turn:
    """Round the hyper-parameters once and lay out what the pipeline gets.

    ``factor`` multiplies gradients.
    """
    counts = [
        step_of(
            due.member,
            # A mapping that makes what it lacks must make nothing for a gradient that never comes.
            states[due.member.owner]
            if due.gradient is not None
            else states.get(due.member.owner, {}),
            kept.store,
            begins=due.gradient is not None,
        )
        for due in dues
    ]
    rows = [_row_of_bystander(member) for member in kept.all()]
    table: dict[tuple[int, float, float], int] = {}
    scalars: list[tuple[float, ...]] = []
    for due, count in zip(dues, counts, strict=True):
        key = (id(due.group), count.item() + 1.0, due.scale)
        if key not in table:
            table[key] = len(scalars)
            scalars.append(_scalar_row(due.group, int(key[1]), factor / due.scale))
        row = _row(due.member, due.on_host, kept.store, table[key], int(key[1]))
        rows[due.member.number] = row
    return Turn(dues, counts, rows, np.array(scalars, dtype=np.float32).reshape(-1, 9))


def account(turn: Turn, states: States) -> None:
    """Count the step, and tell autograd that native code wrote to the weights.

    A stale graph would otherwise use the new ones.
    """
    if not turn.dues:
        return
    torch._foreach_add_(turn.counts, 1.0)
    torch.autograd.graph.increment_version([due.member.parameter for due in turn.dues])
    for due, count in zip(turn.dues, turn.counts, strict=True):
        state = states[due.member.owner]
        if "step" not in state:
            state.update({"step": count, **due.member.views})
        due.member.begun = True
        due.member.remember()


def step_of(
    member: Member, state: dict[str, Any], store: StateStore, *, begins: bool = True
) -> torch.Tensor:
    """Return the parameter's step count, and see to it that its states are what users see.

    A user may have emptied the state (a reset), or put other tensors in (a transplant). Where a
    gradient ``begins`` it, a parameter without states gets them.
    """
    step: torch.Tensor | None = state.get("step")
    if step is None:
        step = torch.zeros((), dtype=torch.float32, device="cpu")
        if member.begun:
            store.put({member.number: {}})
            member.begun = False
    if not begins and not state:
        return step
    state["step"] = step
    member.begun = True
    placed = {k: v for k, v in state.items() if k in member.family.states}
    if any(placed.get(name) is not view for name, view in member.views.items()):
        _transplant(member, placed, store)
        for name in placed:
            del state[name]
        state.update(member.views)
    return step


def _transplant(member: Member, placed: Mapping[str, torch.Tensor], store: StateStore) -> None:
    """Take states that a user put in; those beside them stay what they were."""
    given = {name: s for name, s in placed.items() if not isinstance(s, StateOnDisk)}
    given = {name: in_order_of(member, s) for name, s in given.items()}
    if given and len(given) < len(placed):
        given = store.read([member.number])[member.number] | given
    if given:
        store.put({member.number: given})


def must_seed(member: Member, store: StateStore) -> bool:
    """Return whether someone else wrote the 16-bit weight that a master belongs to."""
    if member.family.dtype == torch.float32 or not member.written_by_others:
        return False
    with member.held():
        return not store.pipeline.unchanged(member.number, member.weight)


def name_of(groups: Groups, group: dict[str, Any], index: int) -> str:
    """Return what to call a parameter in a message."""
    if group.get("param_names"):
        return f"Parameter {group['param_names'][index]!r}"
    number = next(i for i, other in enumerate(groups) if other is group)
    return f"Parameter {index} of group {number}"


def as_step(step: torch.Tensor | float) -> torch.Tensor:
    """Return a step count as torch's optimizers keep it."""
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")


def scalars_of(dues: Iterable[Due], counts: Sequence[torch.Tensor], factor: float) -> list[Any]:
    """Return the hyper-parameters of each parameter's step, to be compared."""
    rows: dict[tuple[int, int], tuple[float, ...]] = {}
    found = []
    for due, count in zip(dues, counts, strict=True):
        key = (id(due.group), int(count.item() + 1.0))
        if key not in rows:
            rows[key] = _scalar_row(due.group, key[1], factor)
        found.append(rows[key])
    return found


def _row(
    member: Member, gradient: torch.Tensor | None, store: StateStore, scalars: int, step: int
) -> StepRow:
    # A function of the parameter and its step alone, so that a resumed run rounds alike.
    key = (step * _GOLDEN + member.number * (_GOLDEN >> 7)) & ((1 << 63) - 1)
    return StepRow(
        member.weight,
        gradient,
        must_seed(member, store),
        scalars,
        key,
        expected=gradient is None,
    )


def _row_of_bystander(member: Member) -> StepRow:
    """Name its weight alone: a commit takes that too."""
    return StepRow(weight=member.weight)


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
