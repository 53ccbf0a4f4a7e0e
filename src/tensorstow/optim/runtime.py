"""``OptimizerRuntime``: what an optimizer owns (store, pipeline, threads), and how it is closed.

[Note: One end] Wrappers are made from an optimizer's class or share its ``__dict__``, so the
optimizer object has no finalizer, and its methods assign no attributes: ``self`` may be a wrapper.
It holds an ``OptimizerRuntime``, as do wrappers, and the last reference to the runtime ends
background work, in reference cycles too. The garbage collector calls weakref callbacks before any
``__del__``, so a store with such a callback would be closed before its last update is over: an
optimizer's store stays open until the runtime closes it (``StateStore.keep``).
Uncommitted steps of a durable run are committed first, or their number is logged; it is a warning
only if they are lost. Runtimes that are
alive at the interpreter's exit are finished there, before files close: see ``_finish_all``. After
that Python takes modules apart, and no run could commit: a durable one is no longer begun.
"""

import _thread
import atexit
import concurrent.futures.thread
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.process import parent_process
from multiprocessing.util import Finalize
from typing import Any

import torch

from tensorstow.base.errors import OptionError, StowError
from tensorstow.base.signals import StopHandlers
from tensorstow.base.update_on import DelayedUpdate
from tensorstow.checkpoint.commits import Commits, in_commit_thread, storage_of
from tensorstow.checkpoint.ranks import Ranks
from tensorstow.checkpoint.run import Extra, RunOptions
from tensorstow.checkpoint.serialize import check_extra
from tensorstow.checkpoint.uploads import Uploads, log_unsent
from tensorstow.checkpoint.worlds import Worlds
from tensorstow.optim.memory_release import MemoryRelease
from tensorstow.optim.step_runner import ParamFilter, StepRunner
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.step.backward_overlap import BackwardOverlap
from tensorstow.step.call_lock import CallLock
from tensorstow.step.deferred_rows import DeferredRows
from tensorstow.step.delayed_overlap import DelayedOverlap
from tensorstow.step.forward_waits import ForwardWaits
from tensorstow.step.param_table import ParamTable
from tensorstow.step.schedule import ForwardOverlap, Schedule, Synchronous, weakly
from tensorstow.step.speculative_overlap import SpeculativeOverlap
from tensorstow.store.remote import Remote

logger = logging.getLogger("tensorstow")

_LEFT = "%d %s since the last commit of %s %s not committed: %s. resume() goes on before %s."
_BY_HAND = "commit_every=None leaves commits to commit()"


class OptimizerRuntime:
    """The parameters, schedule, commits, ranks and step runner of one optimizer."""

    def __init__(
        self,
        offload_policy: OffloadPolicy,
        run: RunOptions,
        call_lock: CallLock,
        ranks: Ranks,
        param_filter: ParamFilter,
        *,
        extra_checked: bool,
    ) -> None:
        """Create the store, schedule and threads of ``offload_policy``; the runtime owns them."""
        self._owner = os.getpid()
        self._finished = True  # until there is something to finish
        if _exit_is_over.is_set() and offload_policy.placement.durable:
            message = (
                "An optimizer with dir= was requested after the functions that run at the"
                " interpreter's exit: nothing could commit its last steps. Make it in the script"
                " itself, or in an exit function that is registered after tensorstow is imported."
            )
            raise StowError(message)
        # Weakly: a parameter, or a model, must not keep the optimizer it was once given to.
        hook = weakly(self._on_gradient)
        with ranks.reporting_errors("the making of the optimizer"):
            self.params = ParamTable(ranks.in_rank_directory(offload_policy), hook)
        self.commits = Commits(
            run.commit_every,
            module=run.module,
            extra=None if run.extra is None else call_lock.allowing_reads(run.extra),
            extra_checked=extra_checked,
            ranks=ranks,
        )
        self.ranks = ranks
        self.call_lock = call_lock
        self.extra: dict[str, Any] = {}
        """``extra`` of the resumed commit."""
        self.saves_references = run.checkpoints == "reference"
        """Whether ``state_dict()`` names a snapshot instead of holding states."""
        self.is_half_loaded = False
        """Groups were loaded, and the states that belong to them not yet."""
        self.uploads: Uploads | None = None
        """The copies of snapshots elsewhere; None until there is one."""
        self.waits: ForwardWaits | None = None
        self.schedule = self._make_schedule(offload_policy, run)
        self.steps = StepRunner(
            self.params, self.schedule, self.commits, ranks, call_lock, param_filter
        )
        self.memory = MemoryRelease(self.steps, self.params, call_lock)
        if run.stop_signals:
            self.commits.stop = StopHandlers(run.stop_signals, self.commits)
        self._finished = False
        self.params.outlive_finalizers()
        _LIVING[next(_NUMBERS)] = self
        if parent_process() is not None:  # a forked one of multiprocessing ends without atexit
            Finalize(None, _finish_all, exitpriority=0)

    def _make_schedule(self, offload_policy: OffloadPolicy, run: RunOptions) -> Schedule:
        if isinstance(offload_policy.overlap, DelayedUpdate) and run.module is not None:
            return DelayedOverlap(self.params, run.module, offload_policy.overlap)
        if offload_policy.timing.is_overlapped and run.module is not None:
            self.waits = ForwardWaits(run.module, weakly(self._wait))
        if offload_policy.timing.can_undo:
            return SpeculativeOverlap(
                self.params, run.accumulation_steps, self.waits, alone=self.ranks.alone
            )
        if offload_policy.timing.begins_early:
            return BackwardOverlap(self.params, run.accumulation_steps, self.waits)
        if run.defers_rows and run.module is not None:
            return DeferredRows(self.params, run.module)
        if self.waits is None:
            return Synchronous(self.params)
        return ForwardOverlap(self.params, self.waits)

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        self.steps.on_gradient(parameter)

    def _wait(self, ids: Iterable[int] | None) -> None:
        self.steps.wait(ids)

    def finish(self, *, asked: bool = True) -> None:
        """Wait for updates and a commit under way, commit the rest, and close everything.

        Unless it was ``asked`` for, the commit is of the last step's end ([Note: One moment] in
        checkpoint.small_values), and none is made with other ranks, which may not finish now.
        Raises an error of background work when everything is closed, unless a call has raised it
        before. Idempotent.
        """
        if self._finished:
            return
        # Set first: an end that raises is not repeated.
        self._finished = True
        try:
            why = "what was under way failed"
            try:
                self.schedule.finish()
                if self.params.store.pipeline.handle.failure_was_raised:
                    self.commits.abandon()
                else:
                    self.commits.join(self.params)
                refusal = self._why_not(asked=asked)
                why = refusal or "the commit of them failed"
                if refusal is None:
                    self._commit_rest(asked=asked)
            finally:
                self._log_uncommitted(why)
        finally:
            # Each part is closed even if another raises. Those that use the store close before it.
            with ExitStack() as last_first:
                if self.params.store.pipeline.handle.is_poisoned:
                    last_first.callback(self.schedule.abort)  # reads of its weights raise no more
                last_first.callback(self.params.close)
                if self.waits is not None:
                    last_first.callback(self.waits.close)
                last_first.callback(self.ranks.close)
                last_first.callback(self.commits.close)
                if self.commits.stop is not None:
                    last_first.callback(self.commits.stop.close)
                if self.uploads is not None:
                    last_first.callback(self.uploads.close)

    def upload(self, name: str, remote: Remote) -> None:
        """Begin to copy a snapshot to ``remote``."""
        self.uploads = self.uploads or Uploads()
        self.uploads.start(remote, name, storage_of(self.params).store, self.ranks)

    def go_on_uploading(self, worlds: Worlds | None) -> None:
        """Go on with copies that an earlier process did not complete; log those of old ranks."""
        self.uploads = self.uploads or Uploads()
        self.uploads.go_on(storage_of(self.params).store, self.ranks)
        if worlds is not None and self.ranks.rank == 0:
            log_unsent(worlds)

    def wait_uploaded(self) -> None:
        """Wait for the copy of a snapshot under way, if any; raise its error if it failed."""
        if self.uploads is not None:
            with self.ranks.reporting_errors("the copy of a snapshot"):
                self.uploads.wait()

    def note_saved(self) -> None:
        """Note that the caller has this step's states; what ``extra`` returns is a commit's."""
        if not self.call_lock.allows_reads:
            self.commits.saved = self.commits.step

    def _uncommitted(self) -> int:
        """Return how many steps of a durable run are in no commit."""
        if not self.params.offload_policy.placement.durable:
            return 0
        return self.commits.step - (self.commits.committed or 0)

    def _log_uncommitted(self, why: str) -> None:
        """Warn if steps are lost: no commit has them, and the caller has not saved their states."""
        left = self._uncommitted()
        if not left or self.commits.saved == self.commits.step:
            return
        steps, are, them = ("step", "is", "it") if left == 1 else ("steps", "are", "them")
        directory = self.params.store.storage.directories[0]
        # Whoever saves references goes on from one of them: none keeps the steps after the last,
        # as with torch's checkpoints.
        level = logging.INFO if self.saves_references and why is _BY_HAND else logging.WARNING
        logger.log(level, _LEFT, left, steps, directory, are, why, them)

    def refuse_lack_of_extra(self, call: str, extra: Extra | None) -> None:
        """Raise OptionError if ``call`` would commit without the extra of earlier commits."""
        if extra is not None:
            check_extra(extra)
        elif self._lacks_extra():
            message = (
                f"{call} was called without extra=, but the last commit has an extra that was"
                " passed to commit(), which the new commit would lack. Pass extra=; {} means none."
            )
            raise OptionError(message)

    def _lacks_extra(self) -> bool:
        """Return whether commits got ``extra`` by hand, so that the next one would lack it."""
        return self.commits.extra_now is None and bool(self.commits.was_given_extra or self.extra)

    def _why_not(self, *, asked: bool) -> str | None:
        """Return why the end does not commit; None if it does."""
        commits = self.commits
        if commits.every.by_hand and not (asked and commits.is_requested):
            return _BY_HAND
        if not (self.ranks.alone or asked):
            return "a commit needs all ranks, and this one ended by an error or without close()"
        if self._lacks_extra():
            return "they would lack the extra that commits got by hand"
        if self.schedule.is_open:
            return "a backward has begun to update by the next step"
        if self.params.store.pipeline.handle.is_poisoned:
            return "the optimizer failed"
        groups = self.steps.contents.groups
        is_of_now = asked or not self._uncommitted()
        return None if is_of_now else commits.step_end.why_not(self.params, groups)

    def _commit_rest(self, *, asked: bool) -> None:
        if self._uncommitted():
            groups, states = self.steps.contents.groups, self.steps.contents.states
            small = None if asked else self.commits.step_end.kept
            self.commits.capture(self.params)
            self.commits.start(self.params, groups, states, small)
            self.commits.join(self.params)

    def finish_and_log(self) -> None:
        """Finish and log errors: a finalizer has no caller to raise them to.

        Python's garbage collector runs in any thread, between any two instructions. The committing
        thread would wait for its own commit, and a thread that holds a lock of Python's own would
        wait for itself. Then another thread finishes, which takes none of these locks to start.
        """
        if self._owner != os.getpid():  # a forked child has nothing to wait for
            self._finished = True
            self.params.abandon()
            return
        if in_commit_thread() or any(lock.locked() for lock in _LOCKS):
            end = threading.Event()
            _ENDS.add(end)
            _thread.start_new_thread(_finish_elsewhere, ([self], end))
        else:
            self._finish_and_log()

    def _finish_and_log(self) -> None:
        try:
            self.finish(asked=False)
        except Exception:
            logger.exception("An optimizer was dropped, and the work after its last step failed")

    def __del__(self) -> None:
        """End background work: the model may outlive the optimizer, and needs its new weights.

        Not a weakref.finalize: that would keep the model alive, which may hold the optimizer. While
        modules are taken apart, at the very end, their names are None: all was finished before.
        """
        if not self._finished and _LIVING is not None:
            self.finish_and_log()


def _finish_elsewhere(held: list[OptimizerRuntime], end: threading.Event) -> None:
    """Finish the one runtime in ``held`` and let go of it; then set ``end``.

    The interpreter may end after that, while this thread must not be in native destructors.
    """
    try:
        held.pop()._finish_and_log()  # noqa: SLF001
    finally:
        _ENDS.discard(end)
        end.set()


_NUMBERS = itertools.count()
_LIVING: "weakref.WeakValueDictionary[int, OptimizerRuntime]" = weakref.WeakValueDictionary()
"""Living runtimes in the order of their creation, which is the same on every rank."""
_ENDS: set[threading.Event] = set()
"""Events that threads set when they have finished runtimes that were dropped."""
_LOCKS: Sequence[Any] = [
    lock
    for lock in (
        getattr(threading, "_shutdown_locks_lock", None),  # until Python 3.12
        getattr(concurrent.futures.thread, "_global_shutdown_lock", None),
    )
    if hasattr(lock, "locked")
]
"""Python's locks that starting and joining threads, and passing work to an executor, take."""
_exit_is_over = threading.Event()
"""Set when ``_finish_all`` begins."""


def _finish_all() -> None:
    """Finish all runtimes that are alive at the interpreter's exit.

    Threads that are not daemons are over by then. Exit functions run last in, first out: those of
    users run before, and may still use their optimizers. An interrupt ends the work for one
    optimizer; the steps of the others are committed nevertheless.
    """
    _exit_is_over.set()
    raised: BaseException | None = None
    for _, runtime in sorted(_LIVING.items()):
        try:
            runtime.finish_and_log()
        except BaseException as error:  # noqa: BLE001  # raised below: the others end first
            raised = raised or error
    for end in [*_ENDS]:
        end.wait()
    if raised is not None:
        raise raised


# The first finalizer that is made registers the exit function of all finalizers, which would close
# our files: this one makes sure that it is registered before ours and so runs after it.
weakref.finalize(_finish_all, int)
atexit.register(_finish_all)
if not threading.main_thread().is_alive():  # imported by an exit function: ours is never called
    _exit_is_over.set()
