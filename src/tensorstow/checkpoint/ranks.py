"""Makes the ranks of a run commit and resume together: a store each, the same generations.

[Note: Ranks] If parameters are sharded and torch.distributed has several ranks, all of them form
the run, whatever their meshes. A commit of one rank is useful only with those of the others, so
each step of a commit runs by `run_on_all`: it succeeds on every rank, or every rank raises. A rank
keeps the previous generation until all have the new one, so all ranks always have one in common.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tensorstow.base.directories import make_directories
from tensorstow.base.launch import launched
from tensorstow.checkpoint.coordinator import Coordinator
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.store.rank_dirs import rank_directory
from tensorstow.tensors.dtensor import layout_of

_T = TypeVar("_T")


def refuse_unjoined(operation: str) -> None:
    """Raise OptionError if this is one of several ranks that a launcher started, without a group.

    ``operation``: the request, as the start of a sentence.
    """
    if not dist.is_initialized():
        launched().refuse_unjoined(operation)


class Ranks:
    """This rank among those of the run; a single process is alone."""

    def __init__(self, coordinator: Coordinator | None = None) -> None:
        """Exchange values through ``coordinator``; None for a process alone."""
        self._coordinator = coordinator
        self.rank, self.world = (
            (0, 1) if coordinator is None else (coordinator.rank, coordinator.world)
        )
        self._resumed_at = 0
        """How many gathers there were then: ranks may have resumed differently often."""
        self._last_due = -1
        self._last_stop: str | None = None

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor], offload_policy: OffloadPolicy) -> "Ranks":
        """Return the ranks that commit the states of ``parameters`` together.

        Raises OptionError if a directory would be taken before they have met.
        """
        if not offload_policy.placement.durable:
            return cls()
        refuse_unjoined("dir= was given to an optimizer")
        several = dist.is_initialized() and dist.get_world_size() > 1
        if not several or all(layout_of(p) is None for p in parameters):
            return cls()
        group: Any = dist.group.WORLD
        # A connection of our own: a wait in the group's would block ours.
        store = group.get_group_store().clone()
        return cls(Coordinator(store, dist.get_rank(), dist.get_world_size()))

    @property
    def alone(self) -> bool:
        """Return whether this is the only rank."""
        return self._coordinator is None

    def in_rank_directory(self, offload_policy: OffloadPolicy) -> OffloadPolicy:
        """Return ``offload_policy`` in this rank's directories; make the one that all share."""
        placement = offload_policy.placement
        if not placement.durable or not placement.directories:
            return offload_policy
        if self.alone:
            return offload_policy
        make_directories(placement.directories)
        mine = tuple(rank_directory(d, self.rank, self.world) for d in placement.directories)
        return replace(offload_policy, placement=replace(placement, directories=mine))

    def next_id(self) -> str | None:
        """Return the common number of the next collective operation; None for a single process."""
        return None if self._coordinator is None else self._coordinator.next_id()

    def run_on_all(self, operation: str, act: Callable[[], _T]) -> _T:
        """Run ``act`` on all ranks; return this rank's result when all have succeeded.

        Raises what it raises, or RankError if another rank failed or does not come.
        """
        with self.reporting_errors(operation):
            result = act()
        self.all_gather(operation)
        return result

    def all_gather(self, operation: str, value: object = None) -> list[Any]:
        """Return each rank's ``value`` (JSON) for ``operation``, by rank."""
        return (
            [value] if self._coordinator is None else self._coordinator.all_gather(operation, value)
        )

    @contextmanager
    def reporting_errors(self, operation: str) -> Iterator[None]:
        """Report errors of the block to the ranks that will wait for this one at ``operation``."""
        try:
            yield
        except BaseException as error:
            if self._coordinator is not None:
                self._coordinator.report_error(operation, error)
            raise

    def decide(
        self,
        step: int,
        due: Callable[[], bool],
        *,
        requests: bool = False,
        stop_status: int | None = None,
    ) -> tuple[bool, int | None]:
        """Return whether ``due``, on rank 0, at ``step``: the same on every rank.

        With it comes the exit status with which the run ends then, None if it goes on. Rank 0
        receives a request (``requests``), and the status of a stop, at this step or a later one.
        """
        if self._coordinator is None:
            return due(), stop_status if requests else None
        if requests:
            if stop_status is not None:
                self._coordinator.put("stop", str(stop_status))  # before the request: both arrive
            self._coordinator.put("asked", "yes")
        if self._coordinator.rank == 0:
            if self._coordinator.take("asked") or due():
                self._last_due = step
                self._last_stop = self._coordinator.take("stop")
            # By the number of restarts a rank that has resumed tells this decision from older ones.
            decision = f"{self._resumed_at} {step} {self._last_due} {self._last_stop or ''}"
            self._coordinator.put("due", decision)
            return self._decision(step, str(self._last_due), self._last_stop)

        # Rank 0 may be ahead, but never past a step that commits: there it waits for all.
        def is_enough(value: str) -> bool:
            resumed_at, newest, *_ = value.split()
            return (int(resumed_at), int(newest)) >= (self._resumed_at, step)

        value = self._coordinator.wait_for(
            "due", is_enough, f"the decision whether step {step} commits"
        )
        return self._decision(step, *value.split()[2:])

    def restart(self) -> None:
        """Forget decisions: the run goes on from another step, which may be an earlier one."""
        self._last_due = -1
        if self._coordinator is not None:
            self._resumed_at = self._coordinator.gathers

    @staticmethod
    def _decision(
        step: int, last_due: str, last_stop: str | None = None
    ) -> tuple[bool, int | None]:
        is_due = int(last_due) == step
        return is_due, int(last_stop) if is_due and last_stop else None

    def close(self) -> None:
        """Announce that this rank has ended. Idempotent."""
        if self._coordinator is not None:
            self._coordinator.leave()
