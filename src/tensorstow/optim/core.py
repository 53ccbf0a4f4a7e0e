"""What an optimizer runs on, and how it ends.

[Note: One end] Wrappers are made from an optimizer's class or share its ``__dict__``, so the
optimizer object has no finalizer: it holds a ``Core``, as does whoever shares it, and the core ends
what runs behind the last step when nobody holds it any more. A reference cycle is no exception. The
collector calls weakref callbacks before any ``__del__``, so a store that closed itself in one would
be closed before its last update is over: what the store of an optimizer has is kept until the core
closes it (``StateStore.keep``). What is alive at the interpreter's end is ended there, before
files close: see ``_finish_all``.
"""

import atexit
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable

from tensorstow.optim.calls import Calls
from tensorstow.optim.checkpoints.commits import Commits
from tensorstow.optim.members import Members
from tensorstow.optim.ranks import Ranks
from tensorstow.optim.run import Run
from tensorstow.optim.schedules.backward import LandedGradients
from tensorstow.optim.schedules.forward import ForwardWaits
from tensorstow.optim.schedules.schedule import AtOnce, BesideBackward, BesideForward
from tensorstow.optim.states.stowage import Stowage

logger = logging.getLogger("tensorstow")

Schedule = AtOnce | BesideForward | BesideBackward


class Core:
    """The schedule, members, commits and ranks of one optimizer."""

    def __init__(
        self,
        members: Members,
        commits: Commits,
        ranks: Ranks,
        stowage: Stowage,
        run: Run,
        calls: Calls,
    ) -> None:
        """Make the schedule that ``stowage`` asks for; all of it ends with this object."""
        self._owner = os.getpid()
        self._finished = True  # until there is something to finish
        self.members = members
        self.commits = commits
        self.ranks = ranks
        self.calls = calls
        self.waits: ForwardWaits | None = None
        self.schedule = self._make_schedule(stowage, run)
        self._finished = False
        members.outlive_finalizers()
        _LIVING[next(_NUMBERS)] = self

    def _make_schedule(self, stowage: Stowage, run: Run) -> Schedule:
        poison = stowage.policy.poison
        kept = weakref.ref(self.members)

        def is_used(number: int) -> bool:
            members = kept()
            return members is None or not members.uses(number)

        landed = LandedGradients(run.accumulation_steps, is_used)
        if stowage.overlap != "none" and run.module is not None:
            self.waits = ForwardWaits(run.module, self._make_wait())
        if stowage.overlap == "backward":
            return BesideBackward(landed, poison=poison)
        return AtOnce() if self.waits is None else BesideForward(self.waits, poison=poison)

    def _make_wait(self) -> Callable[[Iterable[int] | None], None]:
        core = weakref.ref(self)

        def wait(ids: Iterable[int] | None) -> None:
            alive = core()
            if alive is not None:
                with alive.calls.alone():
                    alive.schedule.wait(alive.members, ids)

        return wait

    def finish(self) -> None:
        """Wait for updates and a commit under way, then let everything go. Idempotent.

        Raises what failed behind the last step, when all is closed.
        """
        if self._finished:
            return
        self._finished = True
        try:
            self.schedule.finish(self.members)
            self.commits.join(self.members)
        finally:
            self.commits.close()
            self.ranks.close()
            if self.waits is not None:
                self.waits.close()
            self.members.close()

    def finish_unasked(self) -> None:
        """Finish, and log what failed: there is nobody to raise it to."""
        if self._owner != os.getpid():  # a forked child has nothing to wait for
            self.members.abandon()
            return
        try:
            self.finish()
        except Exception:
            logger.exception("An optimizer was dropped, and what ran behind its last step failed")

    def __del__(self) -> None:
        """End what runs behind the last step: the model may live on, and is to have its weights.

        A method, for a weakref.finalize would keep the model alive, which may hold the optimizer.
        """
        self.finish_unasked()


_NUMBERS = itertools.count()
_LIVING: "weakref.WeakValueDictionary[int, Core]" = weakref.WeakValueDictionary()
"""In the order in which they were made, which is the same on every rank."""


def _finish_all() -> None:
    """End what is alive when the interpreter ends.

    Threads that are not daemons are over by then. Exit functions run last in, first out: those of
    users run before, and may still use their optimizers.
    """
    for _, core in sorted(_LIVING.items()):
        core.finish_unasked()


# The first finalizer that is made registers the exit function of all finalizers, which would close
# our files: this one makes sure that it is registered before ours and so runs after it.
weakref.finalize(_finish_all, int)
atexit.register(_finish_all)
