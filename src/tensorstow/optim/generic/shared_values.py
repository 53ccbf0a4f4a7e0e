"""An optimizer's values for all parameters (counters, modes), passed from piece to piece.

[Note: Values over all parameters]
A class may count its steps in ``group["step"]``, in ``self.count`` or in ``self.state["count"]``.
One step over all parameters changes such a value once; stepped piece by piece it would change once
per piece. So every piece begins with the values from the start of the step, all pieces must leave
the same, and when the step ends the optimizer gets these. If pieces disagree, the value depends on
several parameters (a norm, an estimate): the class does not step per parameter.

The optimizer has every group for each piece, without parameters if the piece is of another group: a
class may read a value of the first group, and count in each.
"""

import copy
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch.optim import Optimizer

from tensorstow.base.errors import OptionError

PLAIN_LOOP = ("foreach", "fused")
"""Off in every run: results of the loop over tensors do not depend on how they are batched."""

OF_PARAMETERS = frozenset({"params", "param_names"})
"""Keys of a group that are no options."""
_TORCHS = frozenset(
    {
        "defaults",
        "param_groups",
        "state",
        "_optimizer_load_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_zero_grad_profile_name",
        "_warned_capturable_if_run_uncaptured",
        "_need_device_dtype_check_for_fused",
    }
)
"""Attributes that torch.optim itself sets in every optimizer."""
_ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None)})
"""Immutable types: most values of groups."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """Parameters of one group to be stepped, each with its states."""

    group: Mapping[str, Any]
    entries: Sequence[tuple[torch.Tensor, dict[str, Any]]]
    names: Sequence[str] | None = None
    """The parameters' names, if those of the group have names."""


@dataclass(frozen=True, slots=True)
class SharedValues:
    """Values that a step reads and changes, other than parameters and their states."""

    groups: list[dict[str, Any]]
    attributes: dict[str, Any]
    """Attributes of the optimizer."""
    state: dict[Any, Any]
    """Entries of ``optimizer.state`` whose keys are not parameters."""

    @classmethod
    def of(cls, optimizer: Optimizer) -> "SharedValues":
        """Return the values that ``optimizer`` has now; nothing is copied."""
        groups = [options_of(group) for group in optimizer.param_groups]
        return cls(groups, own_values(optimizer), foreign(optimizer.state))

    def mappings(self) -> dict[str, dict[Any, Any]]:
        """Return every mapping with values, by the name of its place."""
        groups = {f"param_groups[{n}]": group for n, group in enumerate(self.groups)}
        return {"self": self.attributes, "self.state": self.state, **groups}

    def differences(self, other: "SharedValues") -> list[str]:
        """Return the names of values that differ in ``other``."""
        differing = [f"self.{name}" for name in _differing(self.attributes, other.attributes)]
        differing += [f"self.state[{name!r}]" for name in _differing(self.state, other.state)]
        for number, (mine, theirs) in enumerate(zip(self.groups, other.groups, strict=True)):
            if mine.keys() == theirs.keys() and all(map(is_, mine.values(), map(theirs.get, mine))):
                continue  # nearly always; called for every group with every piece
            names = [name for name in _differing(mine, theirs) if name not in PLAIN_LOOP]
            differing += [f"param_groups[{number}][{name!r}]" for name in names]
        return differing


class SplitStep:
    """One step (or change of mode) of a class over all groups, in several runs."""

    def __init__(
        self,
        inner: Optimizer,
        groups: Sequence[MutableMapping[str, Any]],
        state: MutableMapping[Any, Any],
    ) -> None:
        """Record the current values of ``groups``, ``state`` and ``inner``."""
        self._inner = inner
        self._groups = groups
        self._state = state
        self._numbers = {id(group): number for number, group in enumerate(groups)}
        options = [options_of(group) for group in groups]
        self._before: SharedValues = copied(
            SharedValues(options, own_values(inner), foreign(state))
        )
        self._after: SharedValues | None = None

    @property
    def has_run(self) -> bool:
        """Return whether any piece was stepped."""
        return self._after is not None

    @property
    def changes(self) -> bool:
        """Return whether the runs so far changed a value."""
        return self._after is not None and bool(self._before.differences(self._after))

    def begin(self, runs: Sequence[StepBatch]) -> None:
        """Put the parameters of ``runs`` and the values from before the step into the optimizer."""
        # Each run gets copies: the class may change a value in place.
        values: SharedValues = copied(self._before)
        groups = [
            {**options, **_off(options), **{key: [] for key in OF_PARAMETERS if key in group}}
            for options, group in zip(values.groups, self._groups, strict=True)
        ]
        for run in runs:
            groups[self._numbers[id(run.group)]].update(_parameters_of(run))
        self._inner.param_groups = groups
        self._inner.state.update(values.state)
        _set_attributes(self._inner, values.attributes)

    def end(self) -> None:
        """Record the values that a run left; raise OptionError if they differ between runs."""
        left = SharedValues.of(self._inner)
        if self._after is None:
            self._after = left
        elif differing := self._after.differences(left):
            self._refuse(differing)

    def changed(self) -> dict[str, dict[Any, Any]]:
        """Return the values that the runs changed or added, by the name of their place."""
        if self._after is None:
            return {}
        before = self._before.mappings()
        return {
            place: {
                key: value
                for key, value in values.items()
                if key not in PLAIN_LOOP
                and (key not in before[place] or not same(before[place][key], value))
            }
            for place, values in self._after.mappings().items()
        }

    def adopt(self, changed: Mapping[str, Mapping[Any, Any]]) -> None:
        """Take over what another rank's runs changed: a rank may have run none of a group.

        Raises OptionError if they have changed a value otherwise than this rank's.
        """
        if self._after is None:
            return
        mine, after = self.changed(), self._after.mappings()
        for place, values in changed.items():
            for key, value in values.items():
                if key not in mine[place]:
                    after[place][key] = value
                elif not same(mine[place][key], value):
                    self._refuse([f"{place}: {key}"])

    def _refuse(self, differing: Sequence[str]) -> None:
        message = (
            f"{type(self._inner).__name__} changes {', '.join(differing)} from values of"
            " several parameters: stepped one after the other, parameters give different"
            " values. Use it as it is, un-stowed."
        )
        raise OptionError(message)

    def keep(self) -> None:
        """Assign the values that the runs left to the groups, the state and inner."""
        if self._after is None:
            return
        for group, options in zip(self._groups, self._after.groups, strict=True):
            # Flags that a run switches off stay as the user has set them.
            lasting = {k: group.get(k, v) for k, v in _off(options).items()}
            _assign(group, {**options, **lasting}, [k for k in group if k not in OF_PARAMETERS])
        _assign(self._state, self._after.state, list(foreign(self._state)))
        # ``close`` restores the values in ``_before``: from now on those that are kept.
        self._before = self._after

    def close(self) -> None:
        """Restore inner to the values from before the step, or to those that were kept."""
        _set_attributes(self._inner, self._before.attributes)


def batch_group(run: StepBatch) -> dict[str, Any]:
    """Return the group of ``run`` with its parameters alone."""
    return {**run.group, **_off(run.group), **_parameters_of(run)}


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options, without its parameters and their names."""
    return {k: v for k, v in group.items() if k not in OF_PARAMETERS}


def own_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that the class itself keeps in ``optimizer``."""
    return {name: value for name, value in vars(optimizer).items() if name not in _TORCHS}


def foreign(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the entries of a state whose keys are not parameters."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def copied(value: Any) -> Any:  # noqa: ANN401
    """Return ``value`` with containers and tensors of its own; other objects are the same."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, SharedValues):
        return SharedValues(copied(value.groups), copied(value.attributes), copied(value.state))
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        mapping = copy.copy(value)  # an OrderedDict, or a defaultdict with its factory
        for key, item in value.items():
            if type(item) not in _ATOMS:
                mapping[key] = copied(item)
        return mapping
    if isinstance(value, tuple | list):
        return _copied_items(value)
    return copy.copy(value) if isinstance(value, set | deque | bytearray) else value


def _copied_items(value: Any) -> Any:  # noqa: ANN401
    items = [copied(item) for item in value]
    if isinstance(value, list):
        return items
    if all(map(is_, items, value)):
        return value  # it is immutable
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def same(a: Any, b: Any) -> bool:  # noqa: ANN401
    """Return whether two values are bitwise equal; values that cannot be compared are not."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        alike = same_bits(a, b)
    elif isinstance(a, dict):
        alike = a.keys() == b.keys() and all(same(item, b[key]) for key, item in a.items())
    elif isinstance(a, list | tuple | deque):
        alike = len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    elif callable(a):
        alike = getattr(a, "__qualname__", None) == getattr(b, "__qualname__", None)
    elif not _compares(type(a)) and hasattr(a, "__dict__"):
        alike = same(vars(a), vars(b))
    else:
        alike = _equal(a, b)
    return alike


def _compares(kind: type[Any]) -> bool:
    # The last base is ``object``, which compares identities.
    return "__eq__" in {name for base in kind.__mro__[:-1] for name in vars(base)}


def _equal(a: Any, b: Any) -> bool:  # noqa: ANN401
    try:
        return bool(a == b) or bool(a != a and b != b)  # noqa: PLR0124  # NaN
    except (TypeError, ValueError, RuntimeError):
        return False


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors are bitwise equal; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape or a.device != b.device:
        return False
    if a.is_meta or torch.equal(a, b):
        return True
    nan = a.isnan()
    return bool(nan.any()) and torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan])


def _off(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: False for name in PLAIN_LOOP if name in options}


def _parameters_of(run: StepBatch) -> dict[str, Any]:
    named = {} if run.names is None else {"param_names": list(run.names)}
    return {"params": [parameter for parameter, _ in run.entries], **named}


def _differing(mine: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> list[Any]:
    both = [key for key in mine if key in theirs]
    changed = [key for key in both if not same(mine[key], theirs[key])]
    return [*changed, *(mine.keys() ^ theirs.keys())]


def _set_attributes(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
    attributes = vars(optimizer)
    for name in own_values(optimizer).keys() - values.keys():
        del attributes[name]
    attributes.update(values)


def _assign(
    target: MutableMapping[Any, Any], values: Mapping[Any, Any], present: Sequence[Any]
) -> None:
    """Assign ``values`` to ``target``; equal values keep their object.

    A learning rate may be a tensor that a scheduler holds.
    """
    for key in present:
        if key not in values:
            del target[key]
    for key, value in values.items():
        old = target.get(key)
        if key in target and same(old, value):
            continue
        if (
            isinstance(old, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and old.shape == value.shape
            and old.dtype == value.dtype
        ):
            old.detach().copy_(value)
        else:
            target[key] = value
