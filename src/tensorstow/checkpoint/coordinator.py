"""Where the ranks of a run leave word for each other.

[Note: The board] It is the store of keys that torch.distributed met over, under a prefix of our
own: it works whatever the backend of the user's group, and disturbs none of its collectives. At a
meeting each rank leaves a word under the meeting's number and its own, and waits for all words.
Waiting is asking again and again, so it holds nothing up, and it ends: when all are there, when one
of them says that it failed or ends, or after the store's timeout, which is what
``init_process_group(timeout=)`` was given.
"""

import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from tensorstow.base.errors import RankError, StowError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("tensorstow")

_T = TypeVar("_T")
_boards = itertools.count()
"""Ranks make their boards in the same order, so the number is the same on all."""
_PAUSES = (0.0005, 0.02)
_FAREWELL_SECONDS = 10.0


class Board:
    """Words that all ranks leave and read. One thread at a time."""

    def __init__(self, store: "Store", rank: int, world: int) -> None:
        """Use ``store``, which all ranks reach; each makes its board at the same point."""
        self.rank, self.world = rank, world
        prefix = f"tensorstow/{next(_boards)}"
        self._store: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        # Any: torch's stub of Store lacks it.
        timeout: Any = getattr(store, "timeout")  # noqa: B009
        self._seconds: float = timeout.total_seconds()
        self._meetings = 0
        self._session: str | None = None
        self._unread: str | None = None
        """The count of those who have read the last meeting's words."""

    def next_id(self) -> str:
        """Return what to call the next meeting: alike on all ranks, and never used twice."""
        what = "the first meeting"
        if self._session is None:
            if self.rank == 0:
                self.announce("session", str(uuid.uuid4()))
            self._session = self.hear("session", lambda _: True, what)
        return f"{self._session}/{self._meetings}"

    def meet(self, what: str, word: object = None) -> list[Any]:
        """Leave ``word`` (JSON); return the words of all ranks when all are there, by rank.

        Raises RankError where a rank failed, is at something other than ``what``, or stays away.
        """
        with self._reached(what):
            number = self._say(what, {"word": word})
            keys = [f"{number}/{rank}" for rank in range(self.world)]

            def look() -> list[Any] | None:
                complete = self._store.check(keys)
                if complete or self._store.check(["trouble"]):
                    said = {r: k for r, k in enumerate(keys) if complete or self._store.check([k])}
                    words = {r: json.loads(self._store.get(key)) for r, key in said.items()}
                    _refuse_failures(what, words)
                    return [words[r]["word"] for r in words] if complete else None
                return None

            words = self._until(
                what,
                look,
                lambda: [r for r, key in enumerate(keys) if not self._store.check([key])],
            )
            self._unread = f"{number}/read"
            self._store.add(self._unread, 1)
            # Everybody has read what was said before, or would not have come to this meeting.
            for key in [self.rank, "read"] if self.rank == 0 else [self.rank]:
                self._store.delete_key(f"{number - 1}/{key}")
        return words

    def fail(self, what: str, error: BaseException) -> None:
        """Say at the next meeting that this rank failed; the others are not waited for."""
        try:
            self._say(what, {"failed": f"{type(error).__name__}: {error}"})
            self._store.set("trouble", "yes")
        except RuntimeError as unreachable:  # what failed is raised; the others will miss this rank
            logger.warning("the other ranks could not be told of %r: %s", error, unreachable)

    def announce(self, name: str, word: str) -> None:
        """Say something to all as ``name``, in place of what was said before."""
        with self._reached(name):
            self._store.set(name, word)

    def take_back(self, name: str) -> bool:
        """Say it no longer; return whether anybody had said it."""
        with self._reached(name):
            return bool(self._store.check([name])) and bool(self._store.delete_key(name))

    def hear(self, name: str, enough: Callable[[str], bool], what: str) -> str:
        """Return what rank 0 announces as ``name``, once it is ``enough``."""

        def look() -> str | None:
            word = self._store.get(name).decode() if self._store.check([name]) else None
            return word if word is not None and enough(word) else None

        with self._reached(what):
            return self._until(what, look, lambda: [0])

    def leave(self) -> None:
        """Say that this rank comes to no further meeting."""
        # Whatever the store refuses now: there is nobody left to be told.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "yes")
            self._store.set("trouble", "yes")
            # The store mostly lives in rank 0: it must not go while others read of their success.
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while self.rank == 0 and self._unread is not None and time.monotonic() < deadline:
                if self._store.add(self._unread, 0) == self.world:
                    break
                time.sleep(_PAUSES[0])

    def _say(self, what: str, word: Mapping[str, Any]) -> int:
        number, self._meetings, self._unread = self._meetings, self._meetings + 1, None
        self._store.set(f"{number}/{self.rank}", json.dumps({"at": what, **word}))
        return number

    def _until(
        self, what: str, look: Callable[[], _T | None], absent: Callable[[], list[int]]
    ) -> _T:
        """Return what ``look`` finds; raise RankError where those who are absent do not come."""
        deadline = time.monotonic() + self._seconds
        pause, longest = _PAUSES
        while (found := look()) is None:
            left = self._left()
            gone = [rank for rank in absent() if rank in left]  # in this order: a word, then gone
            if gone:
                message = f"{_ranks(gone)} ended before {what}, which needs all ranks. {_ADVICE}"
                raise RankError(message)
            if time.monotonic() > deadline:
                message = (
                    f"{_ranks(absent())} did not come to {what} within {self._seconds:g} seconds"
                    f" (init_process_group(timeout=)). {_ADVICE}"
                )
                raise RankError(message)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return found

    def _left(self) -> set[int]:
        if not self._store.check(["trouble"]):
            return set()
        return {rank for rank in range(self.world) if self._store.check([f"left/{rank}"])}

    @contextmanager
    def _reached(self, what: str) -> Iterator[None]:
        try:
            yield
        except StowError:
            raise
        except RuntimeError as error:
            message = (
                f"The other ranks cannot be reached for {what}: torch.distributed's store answers"
                f" {str(error).splitlines()[0]!r}. Mostly rank 0, where it lives, has ended."
                f" {_ADVICE}"
            )
            raise RankError(message) from error


_ADVICE = "See its log, end the others, start all of them again and resume()."


def _refuse_failures(what: str, words: Mapping[int, Mapping[str, Any]]) -> None:
    for rank, said in words.items():
        if "failed" in said:
            message = f"Rank {rank} failed at {said['at']}: {said['failed']} {_ADVICE}"
            raise RankError(message)
        if said["at"] != what:
            message = (
                f"Rank {rank} is at {said['at']} while another one is at {what}: every rank makes"
                " the same calls in the same order. Compare what they run."
            )
            raise RankError(message)


def _ranks(numbers: list[int]) -> str:
    few = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"Rank {few}" if len(numbers) == 1 else f"Ranks {few}"
