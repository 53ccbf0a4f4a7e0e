"""An instance of the user's class that is given one piece's parameters and states per call."""

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from tensorstow.base.errors import OptimizerError, OptionError, StowError
from tensorstow.io.device_link import is_remote
from tensorstow.optim.generic.device_states import to_device, to_host
from tensorstow.optim.generic.known_classes import keeps_nothing_over_all
from tensorstow.optim.generic.leaves import leaf_of
from tensorstow.optim.generic.masters import MASTER, has_master, put_master, stand_ins, take_master
from tensorstow.optim.generic.shared_values import (
    PLAIN_LOOP,
    SplitStep,
    StepBatch,
    batch_group,
    foreign,
    options_of,
)
from tensorstow.tensors.dtensor import layout_of, shard_of

MODES = ("train", "eval")
"""Methods of schedule-free classes that move parameters between two sets of values."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A weight whose states, or itself, are others while the class steps it."""

    weight: torch.Tensor
    stepped: torch.Tensor
    """The weight, or its master."""
    states: dict[str, Any]
    copies: dict[int, tuple[torch.Tensor, torch.Tensor]]
    """Copies of states in host memory, as (copy, original) by the id of the copy."""

    def put(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Return the states that the step left, where they are kept."""
        if self.stepped is not self.weight:
            entry = put_master(self.weight, self.stepped, entry)
        return to_host(entry, self.weight, self.copies) if is_remote(self.weight) else entry


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
        *,
        masters: bool = False,
    ) -> None:
        """Construct the class over parameters without memory, shaped as those of ``groups``.

        ``masters``: 16-bit parameters are stepped by fp32 masters ([Note: Masters]). Raises
        OptionError if the class refuses ``options`` or the shapes.
        """
        self.optimizer_class = optimizer_class
        self._masters = masters
        self._options = dict(options)
        meta_groups = [self._meta_group(group) for group in groups]
        with self._naming("was constructed", OptionError):
            self.inner = optimizer_class(meta_groups, **options)
            self._check_groups(meta_groups)
            self._check_step()
            self.defaults = self._without_flags(self.inner.defaults)
            self.group_options = [
                self._without_flags(options_of(group)) for group in self.inner.param_groups
            ]
            """What the class made of the options of each group."""
            self.first_state = foreign(self.inner.state)
            """What the constructor puts into ``state`` under keys that are no parameters."""
            entries = (e for key, e in self.inner.state.items() if key not in self.first_state)
            self.begins_with_states = any(entries)
            """The class makes its states in its constructor, not in the first step."""
            self._clear()
        self.threads = torch.get_num_threads()
        """Cuts are made for it, and results in 16 bits depend on it: for chunks it stays."""
        self._call: Callable[..., Any] = _unhooked(optimizer_class.step)
        self._hands_on = not keeps_nothing_over_all(optimizer_class)
        self._split_step: SplitStep | None = None
        self._closure: Callable[[], Any] | None = None

    @contextmanager
    def split_step(
        self,
        groups: Sequence[MutableMapping[str, Any]],
        state: MutableMapping[Any, Any],
        method: str = "step",
        closure: Callable[[], Any] | None = None,
    ) -> Iterator[SplitStep | None]:
        """Make the runs inside the block one call of ``method`` over all ``groups``.

        Afterwards ``groups``, and ``state`` under keys that are no parameters, have the values that
        the call left. Yields None for classes that keep nothing there. ``closure`` is given to
        every run, which may call it once; it must return a result that is already computed.
        """
        with self._opened(groups, state, method) as step:
            if step is not None:
                self._closure = closure
            yield step
            if step is not None:
                # A class that counts its steps counts one without gradients too.
                if not step.has_run:
                    self.run([])
                step.keep()

    @contextmanager
    def _opened(
        self,
        groups: Sequence[MutableMapping[str, Any]],
        state: MutableMapping[Any, Any],
        method: str,
    ) -> Iterator[SplitStep | None]:
        """Open a step, of which nothing is left unless it is kept."""
        if not self._hands_on:
            yield None
            return
        outer, call = self._split_step, self._call
        self._split_step = step = SplitStep(self.inner, groups, state)
        self._call = _unhooked(getattr(self.optimizer_class, method))
        try:
            yield step
        finally:
            step.close()
            self._split_step, self._call, self._closure = outer, call, None

    def changes_mode(
        self,
        groups: Sequence[MutableMapping[str, Any]],
        state: MutableMapping[Any, Any],
        mode: str,
    ) -> bool:
        """Return whether going over to ``mode`` would change anything."""
        with self._opened(groups, state, mode) as step:
            self.run([])
            return step is not None and step.changes

    def has_mode(self, mode: str) -> bool:
        """Return whether the class has the method ``mode``."""
        return callable(getattr(self.optimizer_class, mode, None))

    def run(self, runs: Sequence[StepBatch]) -> list[list[dict[str, Any]]]:
        """Step the parameters of ``runs`` by their gradients; return their new entries."""
        if not self._masters and not any(is_remote(p) for run in runs for p, _ in run.entries):
            return self._run(runs)
        taken = [[self._take(*pair) for pair in run.entries] for run in runs]
        batches = [
            StepBatch(run.group, [(one.stepped, one.states) for one in ones], run.names)
            for run, ones in zip(runs, taken, strict=True)
        ]
        return [
            [one.put(entry) for one, entry in zip(ones, entries, strict=True)]
            for ones, entries in zip(taken, self._run(batches), strict=True)
        ]

    def _take(self, weight: torch.Tensor, entry: dict[str, Any]) -> "_Taken":
        """Return what is stepped of a weight: itself or its master, with states where it is."""
        states, copies = to_device(entry, weight.device) if is_remote(weight) else (entry, {})
        if self._masters and has_master(weight):
            master, states = take_master(weight, states)
            return _Taken(weight, master, states, copies)
        return _Taken(weight, weight, states, copies)

    def _run(self, runs: Sequence[StepBatch]) -> list[list[dict[str, Any]]]:
        inner = self.inner
        # As in torch's optimizers, a class may look up an entry that does not exist.
        inner.state = defaultdict(dict, {p: entry for run in runs for p, entry in run.entries})
        if self._split_step is None:
            inner.param_groups = [batch_group(run) for run in runs]
        else:
            self._split_step.begin(runs)
        try:
            with self._naming("took a step", OptimizerError):
                if self._closure is None:
                    self._call(inner)
                else:
                    self._call(inner, self._called_once(self._closure))
            if self._split_step is not None:
                self._split_step.end()
            return [[inner.state.get(p, {}) for p, _ in run.entries] for run in runs]
        finally:
            # The class must not keep the memory of a piece after its step.
            self._clear()

    def _called_once(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return ``closure``, which raises OptimizerError when it is called again."""
        calls = iter((closure,))

        def call() -> Any:  # noqa: ANN401
            for first in calls:
                return first()
            message = (
                f"{self.optimizer_class.__name__} calls its closure several times in a step, and"
                " stowed it has been evaluated once, before the step. Use the class as it is,"
                " un-stowed, or call step() without a closure."
            )
            raise OptimizerError(message)

        return call

    def first_entry(
        self, group: Mapping[str, Any], parameter: torch.Tensor, name: str | None
    ) -> dict[str, Any]:
        """Return the entry that the constructor creates for ``parameter``."""
        parameter = leaf_of(parameter)
        weight = parameter
        if self._masters and has_master(weight):
            parameter, _ = take_master(weight, {})
        params = [parameter] if name is None else [(name, parameter)]
        with self._naming("was constructed", OptionError):
            new = self.optimizer_class([{**options_of(group), "params": params}], **self._options)
        entry: dict[str, Any] = new.state.get(parameter, {})
        if parameter is not weight:
            entry = {**entry, MASTER: parameter.detach()}
        return to_host(entry, weight, {}) if is_remote(weight) else entry

    def expected_entry(
        self, group: Mapping[str, Any], parameter: torch.Tensor, shape: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Return the states that the first step would create for ``parameter``, without memory.

        Empty if the class needs values to create them. ``shape`` is that of a slice, or of a whole
        that is gathered; None: that of this rank's elements.
        """
        stand_in: torch.Tensor = _meta_parameter(parameter, shape)
        stand_in.grad = torch.empty_like(stand_in)
        masters: dict[str, Any] = {}
        if self._masters and has_master(stand_in):
            stand_in, _ = take_master(stand_in, {})
            masters = {MASTER: stand_in.detach()}
        # It fails when it reads a value of a meta tensor: its states exist by then.
        entry: dict[str, Any] = {}
        alone = dict(group)
        name = name_in(group, parameter)
        run = StepBatch(alone, [(stand_in, entry)], None if name is None else [name])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with self._opened([alone], {}, "step"):
                    entry = self._run([run])[0][0]
            except StowError:
                pass
        return {**entry, **masters}

    def add_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Check a new group by the class; return its options with defaults."""
        try:
            with self._naming("was given a group", OptionError):
                self.inner.add_param_group(self._meta_group(group))
                return self._without_flags(options_of(self.inner.param_groups[-1]))
        finally:
            self._clear()

    def repair(
        self, groups: list[dict[str, Any]], entries: Mapping[torch.Tensor, dict[str, Any]]
    ) -> None:
        """Complete groups and entries saved by an older version of the class, in place."""
        try:
            with self._naming("was given a saved state", OptimizerError):
                state = defaultdict(dict, entries)
                self.inner.__setstate__({"state": state, "param_groups": groups})
        finally:
            self._clear()

    def _meta_group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the group, as a user would give it, over parameters without memory."""
        wanted: list[Any] = [
            _meta_parameter(p, None if layout_of(p) is None else p.shape) for p in group["params"]
        ]
        if self._masters:
            (masters,) = stand_ins([{"params": wanted}])
            wanted = [torch.nn.Parameter(p, p.requires_grad) for p in masters["params"]]
        if group.get("param_names"):
            wanted = list(zip(group["param_names"], wanted, strict=True))
        return {**options_of(group), "params": wanted}

    def _without_flags(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options without an implementation that the class chose and the user did not."""
        unasked = [name for name in PLAIN_LOOP if options.get(name) and not self._options.get(name)]
        return {**options, **dict.fromkeys(unasked, False)}

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        inner = [[id(p) for p in group["params"]] for group in self.inner.param_groups]
        wanted = [[id(p) for p in _tensors(group["params"])] for group in groups]
        if inner != wanted:
            message = (
                f"{self.optimizer_class.__name__} sorts its parameters into groups of its own:"
                " they could not be shared with yours. Pass the groups that it creates."
            )
            raise OptionError(message)

    def _check_step(self) -> None:
        hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
        if "step" in vars(self.inner) or any(vars(self.inner).get(name) for name in hooks):
            message = (
                f"{self.optimizer_class.__name__} gives itself step hooks, or another step, in its"
                " constructor: they would be called once per piece. Use it as it is, un-stowed."
            )
            raise OptionError(message)

    @contextmanager
    def _naming(self, when: str, kind: type[OptionError] | type[OptimizerError]) -> Iterator[None]:
        """Raise errors of the class as ``kind``, with the class's name."""
        try:
            yield
        except StowError:
            raise
        except Exception as error:
            message = (
                f"{self.optimizer_class.__name__} {when}, and raised {type(error).__name__}:"
                f" {str(error).rstrip('.')}. It is the class's own error: give it what it asks for,"
                " or use it as it is, un-stowed, if it needs more than parameters and gradients."
            )
            raise kind(message) from error

    def _clear(self) -> None:
        self.inner.param_groups = []
        self.inner.state = defaultdict(dict)


def _unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step without torch's wrapper: its global hooks are for the user's step, once."""
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step


def name_in(group: Mapping[str, Any], parameter: torch.Tensor) -> str | None:
    """Return the name that ``parameter`` has in its group, or None."""
    names: Sequence[str] = group.get("param_names") or ()
    if not names:
        return None  # options alone, without the parameters, are a group without names too
    pairs = zip(names, group["params"], strict=False)
    return next((name for name, other in pairs if other is parameter), None)


def _meta_parameter(
    parameter: torch.Tensor, shape: Sequence[int] | None = None
) -> torch.nn.Parameter:
    if is_lazy(parameter):
        message = (
            "A parameter of a lazy module was given, which has no shape yet, and StowedOptimizer"
            " tries the class out on shapes. Run a forward of the model before it is made."
        )
        raise OptionError(message)
    if shape is None:
        empty = torch.empty_like(shard_of(parameter), device="meta")
    else:
        empty = torch.empty(tuple(shape), dtype=parameter.dtype, device="meta")
    return torch.nn.Parameter(empty, requires_grad=empty.is_floating_point() or empty.is_complex())


def listed(params: ParamsT) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return the user's parameters as a list, and as groups of tensors.

    In the groups names are under ``param_names``, as torch has them.
    """
    if isinstance(params, torch.Tensor):
        message = "A tensor was given as params: pass a list of tensors, or of groups."
        raise OptionError(message)
    items: list[Any] = list(params)
    if items and isinstance(items[0], dict):
        items = [{**group, "params": _items(group["params"])} for group in items]
    groups = items if items and isinstance(items[0], dict) else [{"params": items}]
    return items, [{**group, **_named(group["params"])} for group in groups]


def _items(params: Any) -> list[Any]:  # noqa: ANN401
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _tensors(items: Sequence[Any]) -> list[torch.Tensor]:
    return [item[1] if isinstance(item, tuple) else item for item in items]


def _named(items: Sequence[Any]) -> dict[str, Any]:
    names = [item[0] for item in items if isinstance(item, tuple)]
    named = {"param_names": names} if names and len(names) == len(items) else {}
    return {"params": _tensors(items), **named}
