"""Exchanges small values among ranks, by torch.distributed's key-value store.

[Note: Coordinator] It uses the store of torch.distributed's rendezvous under a prefix of its own,
so it works with any backend and does not interfere with collectives. In a gather each rank posts a
value under the gather's number and its own rank. Rank 0 polls for all of them and posts them
together, for which the others poll: N ranks exchange N values in a few messages each, not N
squared. Polling ends when the values are there, when a rank reports an error or leaves, or after
the store's timeout (``init_process_group(timeout=)``).
"""

import contextlib
import itertools
import json
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from tensorstow.base.errors import RankError, StowError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("tensorstow")

_T = TypeVar("_T")
_numbers = itertools.count()
"""Ranks make their coordinators in the same order, so the number is the same on all."""
_PAUSES = (0.0005, 0.02)
_PAUSE_PER_RANK = 0.00005
"""Seconds: the store serves one request after the other, some 100,000 a second."""
_FAREWELL_SECONDS = 10.0


class Coordinator:
    """Exchanges small values between ranks through torch.distributed's store, on one thread."""

    def __init__(self, store: "Store", rank: int, world: int) -> None:
        """Use ``store``, which all ranks reach; each makes its coordinator at the same point."""
        self.rank, self.world = rank, world
        prefix = f"tensorstow/{next(_numbers)}"
        self._store: Store = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        # Any: torch's stub of Store lacks it.
        timeout: Any = getattr(store, "timeout")  # noqa: B009
        self._seconds: float = timeout.total_seconds()
        self._gathers = 0
        self._session: str | None = None
        self._unread: str | None = None
        """The key that counts the ranks which have read the values of the last gather."""

    def next_id(self) -> str:
        """Return an id of the next gather: the same on all ranks, and never used twice."""
        operation = "the first gather"
        if self._session is None:
            if self.rank == 0:
                self.put("session", str(uuid.uuid4()))
            self._session = self.wait_for("session", lambda _: True, operation)
        return f"{self._session}/{self._gathers}"

    def all_gather(self, operation: str, value: object = None) -> list[Any]:
        """Post ``value`` (JSON); return the values of all ranks when all are there, by rank.

        Raises RankError if a rank failed, is at another operation, or does not come.
        """
        with self._naming_unreachable(operation):
            number = self._post(operation, {"value": value})
            keys = [f"{number}/{rank}" for rank in range(self.world)]
            together = f"{number}/all"

            def absent() -> list[int]:
                if self.rank != 0 and self._store.check([together]):
                    return []
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                return missing or [0]  # who was to post them together

            poll = self._collect if self.rank == 0 else self._receive
            values = self._poll(operation, lambda: poll(operation, keys, together), absent)
            self._unread = f"{number}/read"
            self._store.add(self._unread, 1)
            # Every rank has read the gather before, or would not have come to this one.
            for key in [self.rank, "read", "all"] if self.rank == 0 else [self.rank]:
                self._store.delete_key(f"{number - 1}/{key}")
        return values

    def _collect(self, operation: str, keys: list[str], together: str) -> list[Any] | None:
        """Post the values of all ranks together, and return them; None if some are missing."""
        if not self._store.check(keys):
            self._refuse_failed(operation, keys)
            return None
        posted = [json.loads(text) for text in self._store.multi_get(keys)]
        operations = {entry["at"] for entry in posted if "value" in entry}
        is_usual = operations == {operation} and all("value" in entry for entry in posted)
        values = [entry.get("value") for entry in posted]
        self._store.set(
            together, json.dumps({"at": operation, "values": values} if is_usual else posted)
        )
        _refuse_failures(operation, dict(enumerate(posted)))
        return values

    def _receive(self, operation: str, keys: list[str], together: str) -> list[Any] | None:
        """Return the values that rank 0 has posted together; None if it has not."""
        if not self._store.check([together]):
            self._refuse_failed(operation, keys)
            return None
        posted: Any = json.loads(self._store.get(together))
        if isinstance(posted, list):
            _refuse_failures(operation, dict(enumerate(posted)))
        elif posted["at"] != operation:
            _refuse_failures(operation, {0: posted})
        values: list[Any] = posted["values"]
        return values

    def _refuse_failed(self, operation: str, keys: Sequence[str]) -> None:
        """Raise RankError if a rank that is here has failed; cheap if none has."""
        if self._store.check(["trouble"]):
            here = {rank: key for rank, key in enumerate(keys) if self._store.check([key])}
            posted = {rank: json.loads(self._store.get(key)) for rank, key in here.items()}
            _refuse_failures(operation, posted)

    def report_error(self, operation: str, error: BaseException) -> None:
        """Post ``error`` for the others' next gather to raise; does not wait for them."""
        try:
            self._post(operation, {"failed": f"{type(error).__name__}: {error}"})
            self._store.set("trouble", "yes")
        except (
            RuntimeError
        ) as unreachable:  # the caller raises its own error; the others will miss this rank
            logger.warning("%r could not be reported to the other ranks: %s", error, unreachable)

    def put(self, name: str, value: str) -> None:
        """Set the value of ``name`` for all ranks."""
        with self._naming_unreachable(name):
            self._store.set(name, value)

    def take(self, name: str) -> str | None:
        """Remove ``name``; return its value, or None if it had none."""
        with self._naming_unreachable(name):
            if not self._store.check([name]):
                return None
            value: str = self._store.get(name).decode()
            self._store.delete_key(name)
            return value

    def wait_for(self, name: str, is_enough: Callable[[str], bool], operation: str) -> str:
        """Return the value that rank 0 puts as ``name``, once ``is_enough`` is true of it.

        Raises RankError if rank 0 leaves or does not come.
        """

        def poll() -> str | None:
            value = self._store.get(name).decode() if self._store.check([name]) else None
            return value if value is not None and is_enough(value) else None

        with self._naming_unreachable(operation):
            return self._poll(operation, poll, lambda: [0])

    def leave(self) -> None:
        """Announce that this rank takes part in no further gather."""
        # Errors of the store are ignored now: no rank is left to read it.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "yes")
            self._store.set("trouble", "yes")
            # Rank 0 mostly hosts the store, and must not end while others still read their results.
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while self.rank == 0 and self._unread is not None and time.monotonic() < deadline:
                if self._store.add(self._unread, 0) == self.world:
                    break
                time.sleep(_PAUSES[0])

    def _post(self, operation: str, value: Mapping[str, Any]) -> int:
        number, self._gathers, self._unread = self._gathers, self._gathers + 1, None
        self._store.set(f"{number}/{self.rank}", json.dumps({"at": operation, **value}))
        return number

    def _poll(
        self, operation: str, poll: Callable[[], _T | None], absent: Callable[[], list[int]]
    ) -> _T:
        """Return the first result of ``poll``; raise RankError if a rank left or timed out."""
        deadline = time.monotonic() + self._seconds
        pause, longest = _PAUSES[0], max(_PAUSES[1], _PAUSE_PER_RANK * self.world)
        while (result := poll()) is None:
            left = self._left()
            gone = [
                rank for rank in absent() if rank in left
            ]  # in this order: a rank posts, then leaves
            if gone:
                message = (
                    f"{_ranks(gone)} ended before {operation}, which needs all ranks. {_ADVICE}"
                )
                raise RankError(message)
            if time.monotonic() > deadline:
                message = (
                    f"{_ranks(absent())} did not come to {operation} within {self._seconds:g}"
                    f" seconds (init_process_group(timeout=)). {_ADVICE}"
                )
                raise RankError(message)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return result

    def _left(self) -> set[int]:
        if not self._store.check(["trouble"]):
            return set()
        return {rank for rank in range(self.world) if self._store.check([f"left/{rank}"])}

    @contextmanager
    def _naming_unreachable(self, operation: str) -> Iterator[None]:
        try:
            yield
        except StowError:
            raise
        except RuntimeError as error:
            message = (
                f"The other ranks cannot be reached for {operation}:"
                f" torch.distributed's store answers {str(error).splitlines()[0]!r}."
                f" Mostly rank 0, where it lives, has ended. {_ADVICE}"
            )
            raise RankError(message) from error


_ADVICE = "See its log, end the others, start all of them again and resume()."


def _refuse_failures(operation: str, values: Mapping[int, Mapping[str, Any]]) -> None:
    for rank, posted in values.items():
        if "failed" in posted:
            message = f"Rank {rank} failed at {posted['at']}: {posted['failed']} {_ADVICE}"
            raise RankError(message)
        if posted["at"] != operation:
            message = (
                f"Rank {rank} is at {posted['at']} while another one is at {operation}: every rank"
                " makes the same calls in the same order. Compare what they run."
            )
            raise RankError(message)


def _ranks(numbers: list[int]) -> str:
    few = ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")
    return f"Rank {few}" if len(numbers) == 1 else f"Ranks {few}"
