"""Steps that repeat the last one: native code compares them with it, parameter by parameter.

Most steps differ from the one before in their gradients alone. Then nothing of a parameter needs
Python ([Note: Repeated steps] in csrc/bindings/step_rows.h).
"""

import operator
from collections.abc import Callable
from types import NoneType
from typing import Any, Self

import torch

import tensorstow._native as _native
from tensorstow.base.tiers import Tier
from tensorstow.states.native_pipeline import DTYPE_CODES
from tensorstow.step import validation
from tensorstow.step.managed_param import ManagedParam
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups, States, scalar_row
from tensorstow.tensors.dtensor import PLAIN_TENSORS

_WITHOUT_STATES, _OTHERS = -1, -2  # csrc/bindings/step_rows.cpp
_CONSTANTS = frozenset({bool, int, float, NoneType})


class RepeatedSteps:
    """The last step, and steps that repeat it: of weights in host memory, without commits."""

    def __init__(
        self, params: ParamTable, groups: Groups, states: States, manages: Callable[..., bool]
    ) -> None:
        """Compare with the step of ``groups`` that was just taken.

        ``manages``: whether the states of a parameter are the optimizer's to keep.
        """
        self._store, self._size = params.store, len(params.all())
        self._shapes = _shapes(groups)
        self._owners = [p for group in groups for p in group["params"]]
        found = [params.find(p) for p in self._owners]
        steps = [states[p].get("step") if p in states else None for p in self._owners]
        numbers = [
            _OTHERS
            if param is None and not manages(owner)
            else _WITHOUT_STATES
            if param is None or not _is_count(step)
            else param.number
            for owner, param, step in zip(self._owners, found, steps, strict=True)
        ]
        self._views = [{} if param is None else param.views for param in found]
        self._counts = steps
        self._rows = _native.StepRows(
            torch.Tensor,
            torch.strided,
            list(DTYPE_CODES),
            self._size,
            self._owners,
            numbers,
            steps,
            dict(states),
        )
        self._checked = [_CheckedOptions() for _ in groups]
        self._updated: list[torch.Tensor] = []
        self._scalars: list[tuple[int, int]] = []

    @classmethod
    def after(
        cls, params: ParamTable, groups: Groups, states: States, manages: Callable[..., bool]
    ) -> Self | None:
        """Return what the constructor does; None if native code cannot compare such steps."""
        if not all(_is_plain(param) for param in params.all()):
            return None
        return cls(params, groups, states, manages)

    def gather(self, params: ParamTable, groups: Groups, states: States) -> int:
        """Return the number of gradients of a step that repeats the last one; 0: it does not."""
        if params.store is not self._store or len(params.all()) != self._size:
            return 0
        if _shapes(groups) != self._shapes or not isinstance(states, dict):
            return 0
        for group, checked in zip(groups, self._checked, strict=True):
            checked.check(group)
        gathered = self._rows.gather(groups, self._owners, self._counts, self._views, states)
        if gathered is None:
            return 0
        self._updated, self._scalars = gathered
        return len(self._updated)

    def step(self, groups: Groups, factor: float) -> None:
        """Take the step that was gathered; ``factor`` multiplies its gradients."""
        scalars = [scalar_row(groups[group], step, factor) for group, step in self._scalars]
        self._store.pipeline.step(self._rows, scalars)
        torch.autograd.graph.increment_version(self._updated)
        self._rows.count(self._owners)


class _CheckedOptions:
    """The options of a group when they were last checked."""

    def __init__(self) -> None:
        """Begin with none."""
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


def _is_plain(param: ManagedParam) -> bool:
    return (
        param.tier is Tier.HOST
        and param.owner is param.shard
        and type(param.owner) in PLAIN_TENSORS
    )


def _shapes(groups: Groups) -> list[tuple[int, bool]]:
    return [(len(group["params"]), bool(group["amsgrad"])) for group in groups]
