"""Puts the averages of weights in the place of the weights for a block, and the weights back.

[Note: Exchange] Weights and averages exchange places, a part of a chunk at a time, so that neither
is in memory twice. An fp32 weight goes where its average was in the states. A 16-bit weight is
written from its average, rounded; it comes back from its fp32 master, and no state moves.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from types import TracebackType

import torch

from tensorstow.base.errors import OptionError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.base.sizes import format_count
from tensorstow.checkpoint.resume import pinned_one_at_a_time
from tensorstow.optim.runtime import OptimizerRuntime
from tensorstow.states.chunks import Chunk, slices
from tensorstow.states.layout import Segment
from tensorstow.step.managed_param import ManagedParam
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import States, must_seed, step_of
from tensorstow.tensors.dtensor import flat


class AveragedWeights:
    """The context of ``averaged()``: inside, the weights of a model are their averages."""

    def __init__(
        self,
        runtime: OptimizerRuntime,
        model: torch.nn.Module,
        hooks: Sequence[Callable[[bool], None]],
    ) -> None:
        """Change nothing yet; ``hooks`` are called before and after weights are written."""
        self._runtime = runtime
        self._model = model
        self._hooks = hooks
        self._numbers: frozenset[int] = frozenset()
        self._is_inside = False

    def __enter__(self) -> None:
        """Wait for updates, and put the averages in place."""
        try:
            self._runtime.call_lock.run("averaged", self._begin)
        except BaseException:
            if self._is_inside:  # a signal came meanwhile, or a hook has failed
                self._runtime.call_lock.run("averaged", self._end)
            raise

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        """Put the weights back, also after an error in the block."""
        self._runtime.call_lock.run("averaged", self._end)

    def _begin(self) -> None:
        steps, lock = self._runtime.steps, self._runtime.call_lock
        # The lock lets this call through, because the end of the block is one too.
        if lock.is_averaged:
            message = "averaged() was called inside averaged(): the weights are their averages now."
            raise OptionError(message)
        steps.wait_idle()
        params = self._runtime.params
        _check_model(self._model, params)
        self._numbers = _begun(params, steps.contents.states)
        self._write("averaged()", enters=True)

    def _end(self) -> None:
        self._write("the end of averaged()", enters=False)

    def _write(self, operation: str, *, enters: bool) -> None:
        lock = self._runtime.call_lock

        def act() -> None:
            # If the weights cannot come back, resume() must be possible.
            lock.is_averaged = self._is_inside = False
            exchange(self._runtime.params, self._numbers, enters=enters)
            lock.is_averaged = self._is_inside = enters

        with SignalsDeferred():
            for hook in self._hooks:
                hook(False)  # noqa: FBT003  # gradients stay
            self._runtime.ranks.run_on_all(operation, act)
            for hook in self._hooks:
                hook(False)  # noqa: FBT003  # gradients stay


def _check_model(model: torch.nn.Module, params: ParamTable) -> None:
    """Raise OptionError unless there are averages, all of parameters of ``model``."""
    averaged = [param for param in params.all() if param.family.ema]
    if not averaged:
        message = (
            "averaged() was called, and this optimizer keeps no averages. Pass ema=, such as"
            " 0.9999, when you create it."
        )
        raise OptionError(message)
    ids = {id(parameter) for parameter in model.parameters()}
    foreign = sum(id(param.owner) not in ids for param in averaged)
    if foreign:
        count = format_count(len(averaged), "parameter")
        message = (
            f"averaged() was called with a {type(model).__name__} that lacks {foreign} of the"
            f" {count} which have averages. Pass the model that the optimizer trains."
        )
        raise OptionError(message)


def _begun(params: ParamTable, states: States) -> frozenset[int]:
    """Return the numbers of parameters that have been averaged, after users' edits of states."""
    numbers = []
    for param in params.all():
        if not param.family.ema:
            continue
        state = states.get(param.owner, {})
        if float(step_of(param, state, params.store, begins=False)) > 0.0:
            numbers.append(param.number)
    return frozenset(numbers)


@torch.no_grad()
def exchange(params: ParamTable, numbers: AbstractSet[int], *, enters: bool) -> None:
    """Write averages to the weights of parameters, or the weights back ([Note: Exchange])."""
    averaged = [params.all()[number] for number in sorted(numbers)]
    if enters:
        _seed_masters(params, averaged)
    with pinned_one_at_a_time() as pin:

        def change(chunk: Chunk, streams: Sequence[torch.Tensor]) -> bool:
            for part, part_streams in slices(chunk, streams):
                specs = part.family.specs
                states = {s.name: t for s, t in zip(specs, part_streams, strict=True)}
                source = states["ema" if enters or "master" not in states else "master"]
                for run in part.plan.runs:
                    if run.parameter in numbers:
                        param = params.all()[run.parameter]
                        pin(param)
                        _write_part(param, run, source, swaps="master" not in states)
            # With a master the states have not changed, and are not written back.
            return not chunk.family.has_master

        params.store.edit(numbers, change)
    # ``flat`` writes past the version counters.
    torch.autograd.graph.increment_version([param.parameter for param in averaged])


def _write_part(param: ManagedParam, run: Segment, source: torch.Tensor, *, swaps: bool) -> None:
    """Write a part of ``source`` to a weight; ``swaps``: the weight goes where that was."""
    weight = flat(param.parameter)[run.start : run.start + run.count]
    new = source[run.position : run.position + run.count]
    # A copy on the CPU too: the next line writes to the weight.
    old = weight.to("cpu", copy=True) if swaps else None
    weight.copy_(new)
    if old is not None:
        new.copy_(old)


def _seed_masters(params: ParamTable, averaged: Sequence[ManagedParam]) -> None:
    """Make weights that others wrote the masters now, from which they come back."""
    store = params.store
    params.links.fetch(averaged)
    for param in averaged:
        if must_seed(param, store):
            states = store.read([param.number])[param.number]
            store.put({param.number: {**states, "master": params.weight(param.number).float()}})
