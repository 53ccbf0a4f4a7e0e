"""Defers updates of rows with a zero gradient until the rows are read: ``defer_untouched=True``.

[Note: Rows] A token touches one row of an embedding, and the experts that it is routed to. All
other rows have a zero gradient, and dense Adam updates them all the same: weights decay, and go on
with their momentum. Here their chunks leave these updates out, and make them later in one pass
([Note: Deferred updates] in csrc/pipeline/deferred_updates.h), with the same bits. Before a module
reads rows, their chunks catch up. Any other read of the weight makes all of its chunks catch up, as
[Note: Unpublished] says, and so does every read of states, and a commit.
"""

import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        message = f"{asked} without module=: hooks on the model say which rows it reads. Pass it."
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
            " nn.Embedding that is not tied and has no max_norm, or stacked experts of"
            " transformers, trained as plain parameters in host memory. Leave it out."
        )
    else:
        return
    raise OptionError(message)


def _reads_rows(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        plain = type(module).forward is nn.Embedding.forward and "forward" not in vars(module)
        return plain and module.max_norm is None and not module.sparse
    return any(True for _ in module.parameters(recurse=False)) and is_of_experts(module)


def _is_plain(parameter: torch.Tensor) -> bool:
    is_away = device_link.is_remote(parameter) or pager_of(parameter) is not None
    return layout_of(parameter) is None and not is_away and parameter.is_contiguous()


def _rows_of_call(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    """Return the rows that a call of a module reads, in any order; some may be out of range."""
    if isinstance(module, nn.Embedding):
        rows: torch.Tensor = args[0] if args else kwargs["input"]
        return rows.detach().reshape(-1)
    return routing_of(module, args, kwargs).detach().reshape(-1)


class _DeferredWeight:
    """A weight whose updates are deferred by chunk."""

    def __init__(self, param: ManagedParam, store: StateStore) -> None:
        """Find the chunks of ``param``, and let them defer."""
        self.param = param
        self.row = param.numel // len(param.owner)
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
        """Return the numbers of the chunks that have elements of ``rows``."""
        found: npt.NDArray[np.int64] = np.unique(rows.cpu().numpy()).astype(np.int64)
        found = found[(found >= 0) & (found < len(self.param.owner))] * self.row
        first = np.searchsorted(self._starts, found, side="right") - 1
        last = np.searchsorted(self._starts, found + self.row - 1, side="right") - 1
        edges = np.zeros(len(self.chunks) + 1, dtype=np.int64)
        np.add.at(edges, np.maximum(first, 0), 1)
        np.add.at(edges, last + 1, -1)
        return [self.chunks[k] for k in np.flatnonzero(np.cumsum(edges[:-1]))]


class _ReadHooks:
    """Hooks on modules that read rows; a copy of the model has some that do nothing."""

    def __init__(self, schedule: "DeferredRows | None" = None) -> None:
        """Call ``schedule`` while it is alive."""
        self._schedule = (lambda: None) if schedule is None else weakref.ref(schedule)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001  # a graph has no reads
    def before(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Have the rows that a call reads catch up."""
        schedule = self._schedule()
        if schedule is not None:
            schedule.before_read(module, args, kwargs)

    @torch._disable_dynamo  # type: ignore[attr-defined]  # noqa: SLF001
    def after(self, module: nn.Module, *_: object) -> None:
        """Let reads of other rows wait again."""
        schedule = self._schedule()
        if schedule is not None:
            schedule.after_read(module)

    def __reduce__(self) -> tuple[object, ...]:
        """Give a copy of the model, or a saved one, hooks without an optimizer."""
        return _ReadHooks, ()


class DeferredRows(Synchronous):
    """``overlap="none"`` whose steps leave out rows that have a zero gradient ([Note: Rows])."""

    def __init__(self, params: ParamTable, model: nn.Module) -> None:
        """Put hooks on the modules of ``model`` that read rows."""
        super().__init__(params)
        readers = readers_of(model)
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
        """By the ids of the parameters."""
        self._hooks: list[Any] = []
        hooks = _ReadHooks(self)
        for module in dict.fromkeys(readers.values()):
            before = module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True)
            after = module.register_forward_hook(hooks.after, always_call=True)
            self._hooks += [before, after]

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Make weights ordinary parameters inside the block, which takes a step."""
        for weight in self._weights.values():
            mark_published(weight.param.owner)
        try:
            yield
        finally:
            with self._looking() as weights:
                self._hide(weights)
        self._measure()

    def wait(self, ids: Iterable[int] | None = None) -> None:
        """Return once all rows of the parameters with these ids, or of all, may be read."""
        wanted = None if ids is None else set(ids)
        with self._looking() as weights:
            chosen = [w for w in weights if wanted is None or id(w.param.owner) in wanted]
            self._catch_up(number for w in chosen if w.lagging for number in w.chunks)
            for weight in chosen:
                mark_published(weight.param.owner)

    def finish(self) -> None:
        """Make every update that is still deferred: no step follows."""
        if not self._params.store.pipeline.handle.is_poisoned:
            self.wait()
            self._drop()

    def abort(self) -> None:
        """Let reads of the weights of a store that has failed raise no more."""
        super().abort()
        self._drop()

    def before_read(
        self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Have the rows that a call of ``module`` reads catch up."""
        with self._looking(module) as weights:
            late = [weight for weight in weights if weight.lagging]
            if late:
                rows = _rows_of_call(module, args, kwargs)
                self._catch_up(number for weight in late for number in weight.chunks_of(rows))
            for weight in weights:
                mark_published(weight.param.owner)

    def after_read(self, module: nn.Module) -> None:
        """Let reads of rows that the call of ``module`` has not read wait again."""
        with self._looking(module) as weights:
            self._hide(weights)

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
            for weight in self._weights.values():
                mark_published(weight.param.owner)
            self._store, self._known, self._weights = weakref.ref(store), 0, {}
            store.pipeline.before_reading = weakly(self.wait)
        params = self._params.all()
        for param in params[self._known :]:
            if id(param.owner) in self._params.row_sizes and param.tier is Tier.HOST:
                self._weights[id(param.owner)] = _DeferredWeight(param, store)
        self._known = len(params)

    def _hide(self, weights: Iterable[_DeferredWeight]) -> None:
        """Make reads of weights with deferred updates wait, and raise after a failure."""
        has_failed = self._params.store.pipeline.handle.is_poisoned
        waiter = weakly(self.wait)
        for weight in weights:
            if has_failed or weight.lagging:
                mark_unpublished(weight.param.owner, waiter)

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
            pipeline.step([StepRow(weight=p.weight) for p in self._params.all()], [])

    def _drop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for weight in self._weights.values():
            mark_published(weight.param.owner)
        self._hooks, self._weights = [], {}

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
