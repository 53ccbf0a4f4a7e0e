"""The ranks of a run: each with a store of its own, and all with the same commits.

[Note: Ranks] Where parameters are sharded and torch.distributed has several ranks, all of them are
the run, whatever meshes they form. What one of them commits is of use only with what the others
do, so each step of a commit is `together`: everybody has done it, or everybody raises. A rank keeps
the generation before until all have the new one, so that at any moment there is one which all have.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tensorstow.base.directories import make_directories
from tensorstow.checkpoint.coordinator import Board
from tensorstow.states.offload_policy import Stowage
from tensorstow.store.by_rank import directory_of, refuse_other_worlds
from tensorstow.tensors.dtensor import is_sharded

_T = TypeVar("_T")


class Ranks:
    """This rank among the others; a process alone has no others to ask."""

    def __init__(self, board: Board | None = None) -> None:
        """Meet at ``board``; None for a process alone."""
        self._board = board
        self.rank, self.world = (0, 1) if board is None else (board.rank, board.world)
        self._last_due = -1

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor], stowage: Stowage) -> "Ranks":
        """Return the ranks that commit together what an optimizer of ``parameters`` keeps."""
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if not several or not stowage.placement.durable or not any(map(is_sharded, parameters)):
            return cls()
        group: Any = dist.group.WORLD
        # A connection of our own: whoever waits in the group's does not hold ours up.
        store = group.get_group_store().clone()
        return cls(Board(store, dist.get_rank(), dist.get_world_size()))

    @property
    def alone(self) -> bool:
        """Return whether there are no others."""
        return self._board is None

    def own(self, stowage: Stowage) -> Stowage:
        """Return ``stowage`` in this rank's directories; make the directory that all share.

        Raises OptionError where a run of another number of ranks is in it.
        """
        placement = stowage.placement
        if not placement.durable or not placement.directories:
            return stowage
        refuse_other_worlds(placement.directories[0], self.world)
        if self.alone:
            return stowage
        make_directories(placement.directories)
        mine = tuple(directory_of(d, self.rank, self.world) for d in placement.directories)
        return replace(stowage, placement=replace(placement, directories=mine))

    def next_id(self) -> str | None:
        """Return what all ranks call what they do together next; None for a process alone."""
        return None if self._board is None else self._board.next_id()

    def together(self, what: str, act: Callable[[], _T]) -> _T:
        """Return what ``act`` does, once all ranks have done it.

        Raises what it raises; RankError where another rank failed or does not come.
        """
        with self.telling(what):
            result = act()
        self.meet(what)
        return result

    def meet(self, what: str, word: object = None) -> list[Any]:
        """Return the words of all ranks, by rank."""
        return [word] if self._board is None else self._board.meet(what, word)

    @contextmanager
    def telling(self, what: str) -> Iterator[None]:
        """Tell those who will wait for this rank at ``what`` where it fails before."""
        try:
            yield
        except BaseException as error:
            if self._board is not None:
                self._board.fail(what, error)
            raise

    def decide(self, step: int, due: Callable[[], bool], *, asks: bool = False) -> bool:
        """Return whether ``due``, on rank 0, at ``step``: the same on every rank.

        A rank that ``asks`` is heard by rank 0 at this step or a later one.
        """
        if self._board is None:
            return due()
        if asks:
            self._board.announce("asked", "yes")
        if self._board.rank == 0:
            if self._board.take_back("asked") or due():
                self._last_due = step
            self._board.announce("due", f"{step} {self._last_due}")
            return self._last_due == step

        # Rank 0 may be ahead, but never past a step that commits: there it waits for all.
        def enough(word: str) -> bool:
            return int(word.split(maxsplit=1)[0]) >= step

        word = self._board.hear("due", enough, f"the decision whether step {step} commits")
        return int(word.split()[1]) == step

    def close(self) -> None:
        """Tell the others that this rank comes no more. Idempotent."""
        if self._board is not None:
            self._board.leave()
