"""Commits: when one is due, how it is made, and the thread that makes it durable.

[Note: A commit] Whether a step commits is decided before it begins, so that its update also puts
the new weights into the ring next to the states. What is small (buffers, hyper-parameters, the
caller's extra) is written before ``step()`` returns. Waiting for the writes, the sync of the files
and the transaction happen on another thread. The next step first waits for that thread: until then
no chunk has a second extent that may be overwritten.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext

import torch

from tensorstow.base.errors import OptionError, UnlinkedError
from tensorstow.base.health import Health
from tensorstow.base.signals import SignalsDeferred, StopHandlers
from tensorstow.checkpoint.agreement import COMMIT, ERA, FIRST, era_of
from tensorstow.checkpoint.committed_extents import CommittedExtents
from tensorstow.checkpoint.content import (
    ROWS,
    chunk_record,
    hyper_of,
    layout_of,
    names_of,
    rows_of_others,
)
from tensorstow.checkpoint.frozen_weights import CHECKSUMS
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.checkpoint.run import Extra, Interval
from tensorstow.checkpoint.serialize import check_extra, flatten
from tensorstow.checkpoint.small_values import SmallValues, StepEnd
from tensorstow.io.transfer_log import LoggedTransfer, TransferLog
from tensorstow.states.native_pipeline import StepRow, poisoning
from tensorstow.states.stored import StoreStorage
from tensorstow.step.managed_param import StepPlan
from tensorstow.step.param_table import ParamTable
from tensorstow.step.step_plan import Groups, States
from tensorstow.store.rank_dirs import refuse_other_worlds, run_directory
from tensorstow.store.records import Content, Generation
from tensorstow.store.store import Store

logger = logging.getLogger("tensorstow")

_FEW = 5
_this_thread = threading.local()
_open_executors: set[ThreadPoolExecutor] = set()
"""An executor that is collected with its optimizer loses its thread before the last commit."""


class Commits:
    """The commits of one optimizer over one store."""

    def __init__(
        self,
        every: Interval,
        *,
        module: torch.nn.Module | None,
        extra: Callable[[], Extra] | None,
        extra_checked: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """Commit names and buffers of ``module``, and the values that ``extra`` returns.

        ``ranks``: the ranks that make each commit together.
        """
        self.every = every
        self.ranks = ranks or Ranks()
        self.module = module
        self.log: TransferLog | None = None
        """The log of a recording, which gets the waits for commits."""
        self.extra_now = extra
        self.step_end = StepEnd(module)
        self._extra_checked = extra_checked
        self.was_given_extra = False
        """Whether a commit by hand had ``extra``, which a later commit would lack."""
        self.step = 0
        """Steps taken since the run began, skipped ones too."""
        self.committed: int | None = None
        """The step of the generation that this run goes on from."""
        self.saved: int | None = None
        """The step whose states the caller took last, by ``state_dict()`` or to a file."""
        self.generation: int | None = None
        """The number of that generation, which is a snapshot's after going back to one.

        In a run that begins anew: the number of a first commit that not all ranks had made.
        """
        self.era = 0
        """How often the run went on with another number of ranks."""
        self.requested = False
        """Whether a commit is pending after ``request_commit()``."""
        self.prompt = False
        """Whether the commit was requested: it is durable when ``step()`` returns."""
        self.stop: StopHandlers | None = None
        """The handlers of signals after which the run commits and ends."""
        self.extents = CommittedExtents()
        self._decided: tuple[int, bool] | None = None
        """How many steps had been taken at the last decision, and whether the next one commits."""
        self._last = time.monotonic()
        self._health = Health("A commit was waited for in a forked process: it is the parent's.")
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[Generation] | None = None
        self._warned_foreign = self._refused_worlds = False

    def refuse_strange(self, params: ParamTable) -> None:
        """Raise OptionError if the directory holds a run that this one would replace."""
        if not params.offload_policy.placement.durable or self.committed is not None:
            return
        store = storage_of(params).store
        if not self._refused_worlds:
            refuse_other_worlds(
                run_directory(store.directories[0], self.ranks.world), self.ranks.world
            )
            self._refused_worlds = True
        newest = store.generation()
        # A run that begins anew may replace the first commit that not all ranks had made.
        if newest is not None and newest.number != self.generation:
            directory = params.store.storage.directories[0]
            message = (
                f"{directory} holds a run, committed at step {newest.step}. Call"
                " resume() first to go on with it, or name another directory for a new one"
                " (`tensorstow run clean` removes a dead run)."
            )
            raise OptionError(message)

    def check_extra(self) -> None:
        """Raise at the first step if ``extra`` returns values that a commit cannot store.

        Only if they could not be checked earlier, because ``extra`` refers to later objects.
        """
        if not self._extra_checked and self.extra_now is not None:
            check_extra(self.extra_now())
        self._extra_checked = True

    def due(self) -> bool:
        """Return whether the step that is about to be taken commits.

        A step that was undone and begins again keeps the decision, which all ranks know.
        """
        if self._decided is not None and self._decided[0] == self.step:
            return self._decided[1]
        is_stopping = self.stop is not None and self.stop.is_asked
        self.prompt = self.requested or is_stopping
        self.requested = False  # a later request is another one
        stop_status = None if self.stop is None else self.stop.status
        step = self.step + 1

        def is_due() -> bool:
            return self.prompt or self.every.is_due(step, time.monotonic() - self._last)

        due, ends_with = self.ranks.decide(
            step, is_due, requests=self.prompt, stop_status=stop_status
        )
        if self.prompt and not due:
            self.requested, self.prompt = True, False  # rank 0 has not received the request yet
        if self.stop is not None:
            self.prompt, self.stop.ends_with = self.prompt or ends_with is not None, ends_with
        self._decided = self.step, due
        return due

    @property
    def is_requested(self) -> bool:
        """Whether a requested commit is pending, or was of a step that was undone."""
        is_undone = self._decided == (self.step, True)
        return self.requested or (is_undone and (self.prompt or self.every.by_hand))

    def reporting_errors(self, *, commits: bool) -> AbstractContextManager[None]:
        """Report errors of the block to ranks that will wait for this step's commit."""
        if not commits:
            return nullcontext()
        return self.ranks.reporting_errors(f"the commit of step {self.step + 1}")

    def join(self, params: ParamTable) -> None:
        """Wait until the commit under way, if any, is durable; raise its error if it failed."""
        if self._pending is None:
            return
        self._health.check_process()
        start = time.monotonic()
        try:
            wait([self._pending])  # an interrupt leaves it to the next call
        finally:
            if (log := self.log) is not None:
                operation = "a commit being made durable"
                log.add(LoggedTransfer("stall", operation, start, time.monotonic()))
        with SignalsDeferred():
            self._join(params)

    def _join(self, params: ParamTable) -> None:
        # Again: a signal handler may have joined it since the wait ended.
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            unlinked: UnlinkedError | None = None
            try:
                generation: object = pending.result()
            except UnlinkedError as error:
                generation, unlinked = error.committed, error
            if isinstance(generation, Generation):
                self.extents.retarget(params.store, storage_of(params))
                self.committed, self.generation = generation.step, generation.number
        except BaseException as error:
            params.store.pipeline.handle.live()  # unless the caller has seen the error already
            params.store.pipeline.handle.poison(error)
            raise
        if unlinked is not None:
            # States and weights are as good as before: the run may go on in another directory.
            raise unlinked

    def abandon(self) -> None:
        """Wait until the commit under way, if any, has ended or failed; raise nothing.

        Call it before loading a commit after a failure that was raised.
        """
        if self._pending is not None:
            wait([self._pending])
        self._pending = None

    def prepare(self, params: ParamTable) -> None:
        """Find weights that others wrote since the last commit, before a step that commits."""
        for param in params.all():
            if param.written_by_others:
                params.store.pipeline.handle.live().forget_capture(param.number)

    def end_step(
        self, params: ParamTable, groups: Groups, states: States, *, commits: bool
    ) -> None:
        """Commit the step that was just taken, or keep what a commit after an exception needs."""
        # First: if the commit raises an error, this is why none can follow for the step.
        self.step_end.forget("the commit of the last step failed")
        if not commits and self.prompt and self._decided == (self.step - 1, True):
            # The step was to commit, and made no update: what was requested is left to the next.
            self.requested, self.prompt = True, False
            if self.stop is not None:
                self.stop.ends_with = None
        if commits:
            self.start(params, groups, states)
        elif self.ranks.alone and not self.every.by_hand:
            self.step_end.keep(params, groups, self.extra_now)

    def start(
        self,
        params: ParamTable,
        groups: Groups,
        states: States,
        small: SmallValues | None = None,
    ) -> None:
        """Make the step that was just taken, with capture, a generation; return before it is one.

        ``small`` None: the current small values.
        """
        operation = f"the commit of step {self.step}"
        with self.ranks.reporting_errors(operation):
            # The ranks that wait for this commit learn of an error of extra(), too.
            small = small or self.small_values(groups, None)
            gathered = self._gather(params, groups, states, small)
        # The generation of before stays until all ranks have committed: [Note: Ranks].
        store, previous = storage_of(params).store, None if self.ranks.alone else self.generation

        def finish_together() -> Generation:
            generation = self.ranks.run_on_all(
                operation, lambda: store.commit(gathered(), keep=previous)
            )
            if not self.ranks.alone:
                # All ranks have the new generation by now.
                store.drop_older()
            return generation

        with SignalsDeferred():  # a submitted commit must be recorded as pending
            if self._executor is None:
                self._executor = ThreadPoolExecutor(
                    1, thread_name_prefix="tensorstow-commit", initializer=_begin_thread
                )
                _open_executors.add(self._executor)
            try:
                self._pending = self._executor.submit(finish_together)
            except RuntimeError:  # the interpreter ends, and no thread works any more
                self._pending = Future()
                self._pending.set_result(finish_together())
            self._last = time.monotonic()

    def small_values(self, groups: Groups, extra: Extra | None) -> SmallValues:
        """Return the current values, with ``extra`` or what the caller's function returns."""
        self.was_given_extra |= extra is not None
        value: object = extra if extra is not None else (self.extra_now() if self.extra_now else {})
        return SmallValues.of_now(groups, value)

    def _gather(
        self, params: ParamTable, groups: Groups, states: States, small: SmallValues
    ) -> Callable[[], Content]:
        """Write ``small``; return a function that waits for states and lists the content."""
        storage = storage_of(params)
        hyper, numbers = flatten(
            hyper_of(params, groups, states, small.options), "a parameter group"
        )
        records = [
            *self.extents.write("extra", small.tensors, storage),
            *self.extents.write("hyper", numbers, storage),
            *self.extents.write_module(self.module, params, storage, small.buffers),
        ]
        hyper |= {COMMIT: self.ranks.next_id(), FIRST: self.committed is None, ERA: self.era}
        if rows := rows_of_others(self.module, params):
            hyper[ROWS] = rows
        if checksums := self.extents.checksums_in_files(self.module, params):
            hyper[CHECKSUMS] = checksums
        layout = layout_of(params, names_of(groups, self.module))
        self._warn_foreign(states)
        step = self.step

        def finish() -> Content:
            with params.store.pipeline.lock:
                params.store.pipeline.wait_written()
                chunks = [chunk_record(c, params.store, storage) for c in params.store.chunks]
            return Content(step, layout, hyper, small.extra, chunks, records)

        return finish

    def _warn_foreign(self, states: States) -> None:
        """Warn once about entries of ``optimizer.state`` under keys that are no parameters."""
        keys: Iterable[object] = states.keys()
        foreign = [key for key in keys if not isinstance(key, torch.Tensor)]
        if foreign and not self._warned_foreign:
            self._warned_foreign = True
            logger.warning(
                "Commits do not keep %s of optimizer.state, under keys that are no parameters:"
                " return it from extra=, which resume() gives back",
                ", ".join(map(repr, foreign[:_FEW])) + (" ..." if len(foreign) > _FEW else ""),
            )

    def commit_in(
        self,
        target: StoreStorage,
        params: ParamTable,
        groups: Groups,
        states: States,
        extra: Extra | None,
    ) -> Generation:
        """Commit the run to another store; this store is unchanged."""
        operation = f"the commit of step {self.step} in another directory"
        with self.ranks.reporting_errors(operation):
            self.capture(params)
            small = self.small_values(groups, extra)
            content = self._gather(params, groups, states, small)()
            content = target.store.copy(storage_of(params).store, content)
        try:
            return self.ranks.run_on_all(operation, lambda: target.store.commit(content))
        finally:
            # A generation refers to them if the commit was made; else they become free.
            for extent in content.extents():
                target.store.release(extent)

    def capture(self, params: ParamTable) -> None:
        """Write the current states and weights that are not on disk."""
        with self.ranks.reporting_errors(f"the commit of step {self.step}"):
            params.update_router.refresh()
            self.prepare(params)
            rows = [StepRow(weight=param.weight) for param in params.all()]
            with SignalsDeferred():
                _run_through(StepPlan([], [], rows, commits=True), params)

    def begin_anew(self, store: Store) -> None:
        """Let the first commit replace the newest generation of ``store``, if there is one."""
        self.generation = max((g.number for g in store.generations()), default=None)
        self._refused_worlds = True  # what others have committed there is of no use

    def resumed(self, generation: Generation, params: ParamTable) -> None:
        """Continue from a generation that was just loaded."""
        # A request for a step that was undone stays: the property reads the old decision.
        self.requested, self._decided = self.is_requested, None
        self.ranks.restart()
        self.step = self.committed = generation.step
        self.generation = generation.number
        # The caller may have set one above that of a snapshot that it goes back to (ADR 0060).
        self.era = max(self.era, era_of(generation))
        self.saved = None
        self._last = time.monotonic()
        self.extents.resumed(params.store, storage_of(params))

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._executor is not None and self._health.is_ours:
            self._executor.shutdown(wait=True)
            _open_executors.discard(self._executor)
            self._executor = None


def in_commit_thread() -> bool:
    """Return whether this is the committing thread, which must not wait for a commit."""
    return getattr(_this_thread, "commits", False)


def _begin_thread() -> None:
    _this_thread.commits = True


def _run_through(plan: StepPlan, params: ParamTable) -> None:
    """Run a step without updates in the pipeline, which writes what is not on disk."""
    path = params.update_router.step_path
    path.begin(plan)
    try:
        with poisoning(params.store.pipeline):
            path.close()
            path.wait()
    finally:
        path.abort()


def storage_of(params: ParamTable, asked: str = "A commit") -> StoreStorage:
    """Return the durable space; raise OptionError, naming ``asked``, for scratch files."""
    storage = params.store.storage
    if isinstance(storage, StoreStorage):
        return storage
    message = (
        f"{asked} was requested, and the states are scratch: nothing of them outlives the process."
        ' Make the optimizer with dir="..." and durability="commit", which is the default there.'
    )
    raise OptionError(message)
