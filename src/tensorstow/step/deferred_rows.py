"""Defers updates of rows with a zero gradient until the rows are read: ``defer_untouched=True``.

[Note: Rows] A token touches one row of an embedding, and the experts that it is routed to. All
other rows have a zero gradient, and dense Adam updates them all the same: weights decay, and go on
with their momentum. Here their chunks leave these updates out, and make them later in one pass
([Note: Deferred updates] in csrc/pipeline/deferred_updates.h), with the same bits. Between steps
such a weight is unpublished ([Note: Unpublished]): ``torch.nn.functional.embedding`` has the chunks
of its rows catch up, and any other read those of all rows, as does a read of states, or a commit. A
module of experts has those of its call catch up, and its weights are published inside of it.
"""

import copy
import inspect
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from tensorstow.base.errors import OptionError
from tensorstow.base.signals import SignalsDeferred
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import UpdateTiming
from tensorstow.io import device_link
from tensorstow.nn.routed_experts import is_of_experts, routing_of
from tensorstow.states.native_pipeline import StepRow, poisoning
from tensorstow.states.state_store import StateStore
from tensorstow.step.managed_param import ManagedParam
from tensorstow.step.param_table import ParamTable
from tensorstow.step.schedule import Synchronous, weakly
from tensorstow.step.unpublished import mark_published, mark_unpublished
from tensorstow.tensors.dtensor import layout_of, pager_of

logger = logging.getLogger("tensorstow")

_MEASURED_STEPS = 8
"""Steps after which it is decided whether deferring pays."""
_LEAST_DEFERRED = 0.25
"""Share of a weight's chunks that those steps must have deferred."""


def readers_of(model: nn.Module) -> dict[int, nn.Module]:
    """Return the modules that read only some rows of a weight, by the id of the weight.

    They are embeddings, and the stacked experts of transformers' mixtures. A weight that another
    module has too is read as a whole, and a plain one in host memory alone can be deferred.
    """
    users = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    return {
        id(parameter): module
        for module in model.modules()
        if _reads_rows(module)
        for parameter in module.parameters(recurse=False)
        if users[id(parameter)] == 1 and parameter.requires_grad and _is_plain(parameter)
    }


def refuse_without_rows(model: nn.Module | None, timing: UpdateTiming, *, moves: bool) -> None:
    """Raise OptionError if no update of ``model`` could be deferred.

    ``moves``: whether any states are on disk.
    """
    asked = "defer_untouched=True was given"
    if model is None:
        message = (
            f"{asked} without module=, whose modules say what is read by rows. Pass the model."
        )
    elif timing.is_overlapped:
        message = f'{asked} with {timing.keyword}: use overlap="none", which alone defers updates.'
    elif not moves:
        message = (
            f"{asked}, and all states stay in host memory, where it saves nothing. Use"
            ' states="disk", or leave it out.'
        )
    elif not readers_of(model):
        message = (
            f"{asked}, and the model has no weight of which only some rows are read: an"
            " nn.Embedding that is not tied, or stacked experts of transformers, trained as plain"
            " parameters in host memory. Leave it out."
        )
    else:
        return
    raise OptionError(message)


def _reads_rows(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        # Steps refuse sparse gradients.
        return not module.sparse
    has_own = any(True for _ in module.parameters(recurse=False))
    # A forward that others put on the module would be bypassed: the class's own is called.
    return has_own and "forward" not in vars(module) and is_of_experts(module)


def _is_plain(parameter: torch.Tensor) -> bool:
    is_away = device_link.is_remote(parameter) or pager_of(parameter) is not None
    is_whole = layout_of(parameter) is None and parameter.is_contiguous()
    return is_whole and not is_away and parameter.numel() > 0


class _DeferredWeight:
    """A weight whose updates are deferred by chunk."""

    def __init__(self, param: ManagedParam, store: StateStore) -> None:
        """Find the chunks of ``param``, and let them defer."""
        self.param = param
        self.row = param.numel // len(param.owner)
        # Native code defers updates only of chunks that have one parameter alone.
        alone = [c for c in store.chunks if [*c.owners] == [param.number]]
        pieces = sorted((c.plan.runs[0].start, c.number) for c in alone)
        self._starts = np.array([start for start, _ in pieces], dtype=np.int64)
        self.chunks = [number for _, number in pieces]
        self._pipeline = store.pipeline
        self.steps = 0
        self.defer(is_on=True)

    def defer(self, *, is_on: bool) -> None:
        """Let the chunks defer updates from now on, or not."""
        self._pipeline.handle.live().set_deferring(self.chunks, is_on)

    @property
    def lagging(self) -> int:
        """The number of its chunks that have deferred updates."""
        return self._pipeline.handle.live().lagging(self.param.number)

    def chunks_of(self, rows: torch.Tensor) -> list[int]:
        """Return the numbers of the chunks that have elements of ``rows``.

        Some rows may be out of range. All chunks are returned for rows that cannot be looked at, as
        inside of ``vmap``.
        """
        try:
            numbers = np.unique(rows.detach().reshape(-1).cpu().numpy())
        except Exception:  # noqa: BLE001  # the call itself raises what is wrong with them
            return self.chunks
        offsets: npt.NDArray[np.int64] = numbers.astype(np.int64)
        offsets = offsets[(offsets >= 0) & (offsets < len(self.param.owner))] * self.row
        first = np.searchsorted(self._starts, offsets, side="right") - 1
        last = np.searchsorted(self._starts, offsets + self.row - 1, side="right") - 1
        # Each row adds 1 at its first chunk and -1 after its last, so sums count a chunk's rows.
        edges = np.zeros(len(self.chunks) + 1, dtype=np.int64)
        np.add.at(edges, np.maximum(first, 0), 1)
        np.add.at(edges, last + 1, -1)
        return [self.chunks[k] for k in np.flatnonzero(np.cumsum(edges[:-1]))]


class _ExpertsCall:
    """The forward of a module of experts: those that a call is given catch up before it.

    Not a hook: torch calls none after an interrupt, and hooks that come later may change what the
    module is given. A copy of the module has its own forward again.
    """

    def __init__(self, module: nn.Module, schedule: "DeferredRows") -> None:
        """Call ``schedule`` while it is alive; neither it nor ``module`` is kept alive."""
        self.__wrapped__ = type(module).forward
        self._module, self._schedule = weakref.ref(module), weakref.ref(schedule)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # a graph has no reads
    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the module's own
        """Call the module's forward."""
        module, schedule = self._module(), self._schedule()
        if module is None or schedule is None:
            return self.__wrapped__(module, *args, **kwargs)
        with schedule.reading(module, args, kwargs):
            return self.__wrapped__(module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature without the module."""
        return inspect.signature(MethodType(self.__wrapped__, self._module()))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401
        """Return the forward of the copied module."""
        return MethodType(self.__wrapped__, copy.deepcopy(self._module(), memo))

    def __reduce__(self) -> tuple[object, ...]:
        """Return the forward of the module that is loaded."""
        return getattr, (self._module(), "forward")


def _publish(weights: Iterable[_DeferredWeight]) -> None:
    for weight in weights:
        mark_published(weight.param.owner)


class DeferredRows(Synchronous):
    """``overlap="none"`` whose steps leave out rows that have a zero gradient ([Note: Rows])."""

    def __init__(self, params: ParamTable, model: nn.Module) -> None:
        """Find what reads rows of weights in ``model``."""
        super().__init__(params)
        readers = readers_of(model)
        # The states of these weights do not exist yet: their chunks will be cut between rows.
        params.row_sizes = {
            id(p): p[0].numel()
            for module in dict.fromkeys(readers.values())
            for p in module.parameters(recurse=False)
            if id(p) in readers
        }
        self._store: weakref.ref[StateStore] | None = None
        self._known = 0
        """How many parameters of the store were looked at."""
        self._weights: dict[int, _DeferredWeight] = {}
        """Deferred weights by the ids of their parameters."""
        self._calls: list[tuple[nn.Module, _ExpertsCall]] = []
        for module in dict.fromkeys(readers.values()):
            if not isinstance(module, nn.Embedding):
                call = _ExpertsCall(module, self)
                module.forward = call
                self._calls.append((module, call))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Make weights ordinary parameters inside the block, which takes a step."""
        try:
            with SignalsDeferred(), self._looking() as weights:
                _publish(weights)
            yield
        finally:
            self.end_step()
        self._measure()

    def end_step(self) -> None:
        """Let reads of rows whose updates are deferred wait again."""
        with SignalsDeferred(), self._looking() as weights:
            self._hide(weights)

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return once all rows of the parameters with these ids, or of all, may be read."""
        wanted = None if ids is None else set(ids)
        with self._looking() as weights:
            chosen = [w for w in weights if wanted is None or id(w.param.owner) in wanted]
            self._catch_up(number for w in chosen if w.lagging for number in w.chunks)
            _publish(chosen)

    def finish(self) -> None:
        """Make every update that is still deferred: no step follows."""
        for module, call in self._calls:
            # Others may have put another forward in its place since.
            if vars(module).get("forward") is call:
                del module.forward
        # A store that has failed can make no updates.
        if not self._params.store.pipeline.handle.is_poisoned:
            self.wait()
            self._forget()

    def abort(self) -> None:
        """Let reads of the weights of a store that is gone, or has failed, wait no more."""
        super().abort()
        self._forget()
        self._store = None  # look again, if there is another one

    @contextmanager
    def reading(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Iterator[None]:
        """Make a call of a module of experts in the block, when those that it reads catch up."""
        try:
            with SignalsDeferred(), self._looking(module) as weights:
                late = [weight for weight in weights if weight.lagging]
                if late:
                    rows = routing_of(module, args, kwargs)
                    self._catch_up(number for weight in late for number in weight.chunks_of(rows))
                _publish(weights)
            yield
        finally:
            with SignalsDeferred(), self._looking(module) as weights:
                self._hide(weights)

    def _read_rows(self, identity: int, rows: torch.Tensor) -> None:
        """Return once these rows of the parameter with this id may be read."""
        with self._looking():
            weight = self._weights.get(identity)
            if weight is not None and weight.lagging:
                self._catch_up(weight.chunks_of(rows))

    @contextmanager
    def _looking(self, module: nn.Module | None = None) -> Iterator[Sequence[_DeferredWeight]]:
        """Give the deferred weights of the store of now, or those of ``module``.

        ``resume`` makes another store. Nobody else uses the pipeline inside the block.
        """
        store = self._params.store
        with store.pipeline.lock:
            if not store.pipeline.handle.is_poisoned:
                self._look(store)
            if module is None:
                yield [*self._weights.values()]
            else:
                ids = [id(p) for p in module.parameters(recurse=False)]
                yield [self._weights[i] for i in ids if i in self._weights]

    def _look(self, store: StateStore) -> None:
        if self._store is None or self._store() is not store:
            self._forget()
            self._store, self._known = weakref.ref(store), 0
            # States that are read or set must have all of their updates.
            store.pipeline.before_reading = weakly(self.wait)
        params = self._params.all()
        for param in params[self._known :]:
            if id(param.owner) in self._params.row_sizes and param.tier is Tier.HOST:
                self._weights[id(param.owner)] = _DeferredWeight(param, store)
        self._known = len(params)

    def _hide(self, weights: Iterable[_DeferredWeight]) -> None:
        """Make reads of weights with deferred updates wait, and raise after a failure."""
        has_failed = self._params.store.pipeline.handle.is_poisoned
        waiter, row_reader = weakly(self.wait), weakly(self._read_rows)
        for weight in weights:
            if has_failed or weight.lagging:
                owner = weight.param.owner
                # By id: the table of readers must not keep the parameter alive.
                mark_unpublished(owner, waiter, partial(row_reader, id(owner)))

    def _catch_up(self, chunks: Iterable[int]) -> None:
        """Make the deferred updates of these chunks."""
        wanted = list(chunks)
        if not wanted:
            return
        pipeline = self._params.store.pipeline
        # Our own operations on weights must not wait.
        no_waits = torch._C.DisableTorchFunctionSubclass()  # noqa: SLF001
        with SignalsDeferred(), no_waits, poisoning(pipeline):
            pipeline.handle.live().want(wanted)
            # A step without gradients makes the updates that the wanted chunks have missed.
            pipeline.step([StepRow(weight=p.weight) for p in self._params.all()], [])

    def _forget(self) -> None:
        _publish(self._weights.values())
        self._weights = {}

    def _measure(self) -> None:
        """Stop deferring where it does not pay, by what the first steps have deferred."""
        for weight in self._weights.values():
            if weight.steps == _MEASURED_STEPS:
                continue
            weight.steps += 1
            share = weight.lagging / max(len(weight.chunks), 1)
            if weight.steps == _MEASURED_STEPS and share < _LEAST_DEFERRED:
                weight.defer(is_on=False)
                logger.info(
                    "a step touches %.0f %% of a weight of shape %s: its updates are not deferred",
                    100 * (1 - share),
                    tuple(weight.param.owner.shape),
                )
