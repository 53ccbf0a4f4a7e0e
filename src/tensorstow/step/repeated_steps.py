"""Steps that repeat the last one: native code compares them with it, parameter by parameter.

Most steps differ from the one before in their gradients alone. Then nothing of a parameter needs
Python ([Note: Repeated steps] in csrc/bindings/step_rows.h).
"""

import operator
import weakref
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, Self

import torch

import tensorstow._native as _native
from tensorstow.base.errors import StowError
from tensorstow.base.tiers import Tier
from tensorstow.states.layout import OptionalStates
from tensorstow.states.native_pipeline import DTYPE_CODES, UpdatePipeline
from tensorstow.step import validation
from tensorstow.step.managed_param import ManagedParam
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups, States, scalar_row
from tensorstow.tensors.dtensor import PLAIN_TENSORS, stamp_of

_NOT_UPDATED, _OTHERS = -1, -2  # csrc/bindings/step_rows.cpp
_CONSTANTS = frozenset({bool, int, float, NoneType})


class RepeatedSteps:
    """The last step, and steps that repeat it: of weights in host memory, without commits.

    Parameters that the last step did not update must have no gradient: nothing of them was checked.
    """

    def __init__(
        self,
        params: ParamTable,
        updated: Iterable[ManagedParam],
        groups: Groups,
        states: States,
        manages: Callable[[torch.Tensor], bool],
    ) -> None:
        """Compare with the step of ``groups`` that has just ``updated`` these parameters.

        ``manages``: whether the states of a parameter are the optimizer's to keep.
        """
        self._store, self._size = weakref.ref(params.store), len(params.all())
        self._shapes = _shapes(groups)
        self._manages = manages
        self._owners = [p for group in groups for p in group["params"]]
        by_id = {id(param.owner): param for param in updated}
        self._updated = [by_id.get(id(p)) for p in self._owners]
        self._others = [p for p in self._owners if id(p) not in by_id and not manages(p)]
        other_ids = {id(p) for p in self._others}
        self._counts = [None if p is None else states[p.owner]["step"] for p in self._updated]
        self._views = [{} if p is None else p.views for p in self._updated]
        rows = [
            (_OTHERS if id(owner) in other_ids else _NOT_UPDATED, 0, 0, 0, 0)
            if param is None or not _is_count(count)
            else _row(param)
            for owner, param, count in zip(self._owners, self._updated, self._counts, strict=True)
        ]
        self._rows = _native.StepRows(
            torch.Tensor,
            torch.strided,
            list(DTYPE_CODES),
            self._size,
            self._owners,
            rows,
            self._counts,
            dict(states),
        )
        self._checked = [_CheckedOptions() for _ in groups]
        self._gathered: list[torch.Tensor] = []
        self._scalars: list[tuple[int, int]] = []

    @classmethod
    def after(
        cls,
        params: ParamTable,
        updated: Iterable[ManagedParam],
        groups: Groups,
        states: States,
        manages: Callable[[torch.Tensor], bool],
    ) -> Self | None:
        """Return what the constructor does; None if native code cannot compare such steps."""
        if not all(map(_is_plain, params.all())):  # a generator would lose an interrupt
            return None
        return cls(params, updated, groups, states, manages)

    def gather(self, params: ParamTable, groups: Groups, states: States) -> int:
        """Return the number of gradients of a step that repeats the last one; 0: it does not.

        A step that does not is for Python to look at, which raises what there is to be raised.
        """
        if params.store is not self._store() or len(params.all()) != self._size:
            return 0
        if any(map(self._manages, self._others)) or not self._are_groups_same(groups):
            return 0
        if not isinstance(states, dict) or type(groups) is not list:
            return 0
        gathered = self._rows.gather(groups, self._owners, self._counts, self._views, states)
        if gathered is None:
            return 0
        self._gathered, self._scalars = gathered
        return len(self._gathered)

    def _are_groups_same(self, groups: Groups) -> bool:
        if len(groups) != len(self._checked):
            return False
        try:
            for group, checked in zip(groups, self._checked, strict=True):
                checked.check(group)
        except StowError:
            return False
        return _shapes(groups) == self._shapes

    def step(self, pipeline: UpdatePipeline, groups: Groups, factor: float) -> None:
        """Take the step that was gathered; ``factor`` multiplies its gradients."""
        scalars = [scalar_row(groups[group], step, factor) for group, step in self._scalars]
        pipeline.step(self._rows, scalars)
        # ``count`` notes the versions, so they change first.
        torch.autograd.graph.increment_version(self._gathered)
        self._rows.count(self._owners, self._counts)

    def end(self) -> None:
        """Let Python go on: a weight that only these steps have written counts as ours."""
        for param, version in zip(self._updated, self._rows.versions(), strict=True):
            if param is None or param.written is None:
                continue
            # A plain parameter is its own shard: both counters of its stamp are one.
            if stamp_of(param.owner) == (version, param.written[1], version):
                param.remember()


class _CheckedOptions:
    """The options of a group when they were last checked."""

    def __init__(self) -> None:
        self._values: tuple[object, ...] = ()

    def check(self, group: dict[str, Any]) -> None:
        """Check a group's options, unless they are the very objects that were checked last."""
        values = tuple(map(group.get, validation.KEYS_OF_STEPS))
        if self._values and all(map(operator.is_, values, self._values)):
            return
        validation.check_hyper(group)
        validation.refuse_torch_keywords(group)
        # A tensor or a list may have other numbers in the next step.
        betas = values[0] if isinstance(values[0], tuple) else (values[0],)
        are_constant = all(type(v) in _CONSTANTS for v in (*betas, *values[1:]))
        self._values = values if are_constant else ()


def _is_count(step: object) -> bool:
    """Return whether native code can count with a parameter's step count."""
    return (
        type(step) is torch.Tensor
        and step.dtype == torch.float32
        and step.is_cpu
        and step.numel() == 1
    )


def _row(param: ManagedParam) -> tuple[int, int, int, int, int]:
    version, address, _ = param.written or (-1, 0, 0)
    return param.number, version, address, param.numel, DTYPE_CODES[param.family.dtype]


def _is_plain(param: ManagedParam) -> bool:
    return (
        param.tier is Tier.HOST
        and param.owner is param.shard
        and type(param.owner) in PLAIN_TENSORS
    )


def _shapes(groups: Groups) -> list[tuple[int, OptionalStates]]:
    return [(len(group["params"]), OptionalStates.of(group)) for group in groups]
