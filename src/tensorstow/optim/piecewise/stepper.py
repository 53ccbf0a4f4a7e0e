"""An optimizer of the user's class, lent parameters, options and states for one call at a time."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptionError

_PLAIN_LOOP = ("foreach", "fused")


@dataclass(frozen=True, slots=True)
class Run:
    """Parameters of one group to be stepped, each with what the optimizer keeps for it."""

    group: Mapping[str, Any]
    entries: Sequence[tuple[torch.Tensor, dict[str, Any]]]


class Stepper:
    """What torch's own step needs, and nothing that is large: it owns no parameter and no state.

    The loop over tensors is taken (``foreach`` and ``fused`` off), for its results do not depend
    on which tensors are stepped together.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        groups: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        """Construct the class over parameters without memory, shaped as those of ``groups``.

        Whatever it finds wrong with ``options`` or the shapes, it raises.
        """
        self.optimizer_class = optimizer_class
        self._options = dict(options)
        stand_ins = [_stand_in(group) for group in groups]
        self.inner = optimizer_class(stand_ins, **options)
        self._check_groups(stand_ins)
        self.defaults = dict(self.inner.defaults)
        self.group_options = [_options_of(group) for group in self.inner.param_groups]
        """What the class made of the options of each group."""
        self.begins_with_states = any(self.inner.state.values())
        """The class makes its states in its constructor, not in the first step."""
        self.threads = torch.get_num_threads()
        """Cuts are made for it, and results in 16 bits depend on it: for chunks it stays."""
        self._step = _unhooked(optimizer_class.step)
        self._clear()

    def run(self, runs: Sequence[Run]) -> list[list[dict[str, Any]]]:
        """Step the parameters of ``runs`` by their gradients; return what is kept for them now."""
        inner = self.inner
        inner.param_groups = [self._group(run) for run in runs]
        inner.state = defaultdict(dict, {p: entry for run in runs for p, entry in run.entries})
        try:
            self._step(inner)
            return [[inner.state.get(p, {}) for p, _ in run.entries] for run in runs]
        finally:
            self._clear()

    def first_entry(self, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """Return what the constructor keeps for ``parameter``."""
        made = self.optimizer_class([{**group, "params": [parameter]}], **self._options)
        entry: dict[str, Any] = made.state.get(parameter, {})
        return entry

    def expected_entry(
        self, group: Mapping[str, Any], parameter: torch.Tensor, shape: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return what the first step would keep for ``parameter``, tensors without memory.

        Empty where the class does not say before it has numbers. ``shape`` is a slice's.
        """
        stand_in = _without_memory(parameter, shape)
        stand_in.grad = torch.empty_like(stand_in)
        # It fails where a number is asked of a tensor that has none: the states are made by then.
        entry: dict[str, Any] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return self.run([Run(group, [(stand_in, entry)])])[0][0]
            except Exception:  # noqa: BLE001
                return entry

    def add_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Let the class check a new group; return the options that it makes of it."""
        try:
            self.inner.add_param_group(_stand_in(group))
            return _options_of(self.inner.param_groups[-1])
        finally:
            self._clear()

    def repair(
        self, groups: list[dict[str, Any]], entries: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Let the class complete groups and entries that an older version of it saved, in place."""
        try:
            self.inner.__setstate__({"state": defaultdict(dict, entries), "param_groups": groups})
        finally:
            self._clear()

    def _group(self, run: Run) -> dict[str, Any]:
        off = {name: False for name in _PLAIN_LOOP if name in run.group}
        return {**run.group, **off, "params": [p for p, _ in run.entries]}

    def _check_groups(self, given: Sequence[Mapping[str, Any]]) -> None:
        found = [[id(p) for p in group["params"]] for group in self.inner.param_groups]
        wanted = [[id(p) for p in group["params"]] for group in given]
        if found != wanted:
            message = (
                f"{self.optimizer_class.__name__} sorts its parameters into groups of its own:"
                " they could not be shared with yours. Give it the groups that it makes."
            )
            raise OptionError(message)

    def _clear(self) -> None:
        self.inner.param_groups = []
        self.inner.state = defaultdict(dict)


def _unhooked(step: Callable[..., Any]) -> Callable[[Optimizer], Any]:
    """Return the step without torch's wrapper: its global hooks are for the user's step, once."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in {"params", "param_names"}}


def _stand_in(group: Mapping[str, Any]) -> dict[str, Any]:
    return {**_options_of(group), "params": [_without_memory(p) for p in group["params"]]}


def _without_memory(
    parameter: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.nn.Parameter:
    if shape is None:
        empty = torch.empty_like(parameter, device="meta")
    else:
        empty = torch.empty(tuple(shape), dtype=parameter.dtype, device="meta")
    return torch.nn.Parameter(empty, requires_grad=empty.is_floating_point() or empty.is_complex())


def listed(params: ParamsT) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return what a user gave, to be read once more, and the same as groups of tensors.

    In the groups the names are left out.
    """
    if isinstance(params, torch.Tensor):
        message = "A tensor was given as params: give a list of tensors, or of groups."
        raise OptionError(message)
    given: list[Any] = list(params)
    if given and isinstance(given[0], dict):
        given = [{**group, "params": _items(group["params"])} for group in given]
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    return given, [{**group, "params": _tensors(group["params"])} for group in groups]


def _items(params: Any) -> list[Any]:  # noqa: ANN401
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _tensors(items: Sequence[Any]) -> list[torch.Tensor]:
    return [item[1] if isinstance(item, tuple) else item for item in items]
