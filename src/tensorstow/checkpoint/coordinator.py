"""Exchanges small values among ranks, by torch.distributed's key-value store.

[Note: Coordinator] It uses the store of torch.distributed's rendezvous under a prefix of its own,
so it works with any backend and does not interfere with collectives. In a gather each rank posts a
value under the gather's number and its own rank. Rank 0 polls for all of them and posts them
together, for which the others poll: N ranks exchange N values in a few messages each, not N
squared. It returns when all have read them, so that it may end at once, with the store. Polling
ends when the values are there, when a rank reports an error or leaves, or after
the store's timeout (``init_process_group(timeout=)``).
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
_numbers = itertools.count()
"""Ranks make their coordinators in the same order, so the number is the same on all."""
_PAUSES = (0.0005, 0.02)
_PAUSE_PER_RANK = 0.00005
"""Seconds: the store serves one request after the other, some 100,000 a second."""
_FAREWELL_SECONDS = 10.0
_PIECE = 1 << 22
"""Bytes of one value: TCPStore takes no more than 8 million."""


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
        self._pieces: list[str] = []
        """The keys under which rank 0 has posted the last gather."""

    @property
    def gathers(self) -> int:
        """How many gathers there were: the same on all ranks, between two."""
        return self._gathers

    def next_id(self) -> str:
        """Return an id of the next gather: the same on all ranks, and never used twice."""
        operation = "the first gather"
        if self._session is None:
            if self.rank == 0:
                self.put("session", str(uuid.uuid4()))
            self._session = self.wait_for("session", lambda _: True, operation)
        # Each process counts gathers from 0, so the number needs a session to be unique.
        return f"{self._session}/{self._gathers}"

    def all_gather(self, operation: str, value: object = None) -> list[Any]:
        """Post ``value`` (JSON); return the values of all ranks when all are there, by rank.

        Raises RankError if a rank failed, is at another operation, or does not come.
        """
        with self._naming_unreachable(operation):
            number = self._post(operation, {"value": value})
            keys = [f"{number}/{rank}" for rank in range(self.world)]

            def absent() -> list[int]:
                if self.rank != 0 and self._store.check([f"{number}/all"]):
                    return []
                missing = [r for r, key in enumerate(keys) if not self._store.check([key])]
                return missing or [0]  # who was to post them together

            read = self._collect if self.rank == 0 else self._receive
            posted = self._poll(
                operation,
                lambda: read(number, keys),
                absent,
                # Else who is late would find all values there, and go on alone.
                lambda error: self._post_failure(number, operation, error),
            )
            self._store.add(f"{number}/read", 1)
            if self.rank == 0:
                # A rank that has reported an error in place of a value does not read.
                self._wait_for_readers(number, sum("value" in entry for entry in posted))
            self._delete(number - 1)
            # Last: if rank 0 ends by the error, and the store with it, the others have read by now.
            _refuse_failures(operation, dict(enumerate(posted)))
        return [entry["value"] for entry in posted]

    def _collect(self, number: int, keys: list[str]) -> list[dict[str, Any]] | None:
        """Post what all ranks have posted together, and return it; None if some are missing."""
        if not self._store.check(keys):
            self._refuse_failed(number, keys)
            return None
        posted = [json.loads(text) for text in self._store.multi_get(keys)]
        text = json.dumps(posted)
        pieces = [text[i : i + _PIECE] for i in range(0, len(text), _PIECE)]
        # Every rank has read the last gather, because it has posted to this one.
        for key in self._pieces:
            self._store.delete_key(key)
        self._pieces = [f"{number}/all/{place}" for place in range(len(pieces))]
        for key, piece in zip(self._pieces, pieces, strict=True):
            self._store.set(key, piece)
        # Last: whoever finds this key finds the pieces.
        self._store.set(f"{number}/all", str(len(pieces)))
        return posted

    def _receive(self, number: int, keys: list[str]) -> list[dict[str, Any]] | None:
        """Return what rank 0 has posted together; None if it has not."""
        if not self._store.check([f"{number}/all"]):
            self._refuse_failed(number, keys)
            return None
        count = int(self._store.get(f"{number}/all"))
        pieces = [self._store.get(f"{number}/all/{place}") for place in range(count)]
        posted: list[dict[str, Any]] = json.loads(b"".join(pieces))
        return posted

    def _refuse_failed(self, number: int, keys: list[str]) -> None:
        """Raise RankError if a rank that has posted has failed; cheap if none has."""
        if self._store.check([f"{number}/trouble"]):
            posted_keys = {rank: key for rank, key in enumerate(keys) if self._store.check([key])}
            posted = {rank: json.loads(self._store.get(key)) for rank, key in posted_keys.items()}
            _refuse_failures("", {r: entry for r, entry in posted.items() if "failed" in entry})

    def _wait_for_readers(self, number: int, readers: int) -> None:
        """Wait until so many ranks have read a gather, or one has ended."""
        deadline, pause = time.monotonic() + _FAREWELL_SECONDS, _PAUSES[0]
        while self._store.add(f"{number}/read", 0) < readers and not self._left():
            if time.monotonic() > deadline:
                return
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])

    def _delete(self, number: int) -> None:
        """Delete this rank's part of a gather that every rank has read, or it had not come here."""
        self._store.delete_key(f"{number}/{self.rank}")
        if self.rank == 0:
            for key in ("read", "trouble", "all"):
                self._store.delete_key(f"{number}/{key}")

    def report_error(self, operation: str, error: BaseException) -> None:
        """Post ``error`` for the others' next gather to raise; does not wait for them."""
        self._post_failure(self._gathers, operation, error)
        # The report stands for this rank's value in that gather.
        self._gathers += 1

    def _post_failure(self, number: int, operation: str, error: BaseException) -> None:
        failed = {"at": operation, "failed": f"{type(error).__name__}: {error}"}
        try:
            self._store.set(f"{number}/{self.rank}", json.dumps(failed))
            # After the entry, which a rank that sees this key reads.
            self._store.set(f"{number}/trouble", "yes")
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
            # After the key of the rank, which whoever sees this one looks for.
            self._store.set("left", "yes")

    def _post(self, operation: str, value: Mapping[str, Any]) -> int:
        number, self._gathers = self._gathers, self._gathers + 1
        self._store.set(f"{number}/{self.rank}", json.dumps({"at": operation, **value}))
        return number

    def _poll(
        self,
        operation: str,
        poll: Callable[[], _T | None],
        absent: Callable[[], list[int]],
        give_up: Callable[[RankError], object] = lambda _: None,
    ) -> _T:
        """Return the first result of ``poll``; raise RankError if a rank left or timed out.

        That error is passed to ``give_up`` first.
        """
        deadline = time.monotonic() + self._seconds
        pause, longest = _PAUSES[0], max(_PAUSES[1], _PAUSE_PER_RANK * self.world)
        while (result := poll()) is None:
            left = self._left()  # before absent(): a rank posts, then leaves
            gone = [rank for rank in absent() if rank in left] if left else []
            if gone:
                message = (
                    f"{_ranks(gone)} ended before {operation}, which needs all ranks. {_ADVICE}"
                )
                give_up(error := RankError(message))
                raise error
            if time.monotonic() > deadline:
                message = (
                    f"{_ranks(absent())} did not come to {operation} within {self._seconds:g}"
                    f" seconds (init_process_group(timeout=)). {_ADVICE}"
                )
                give_up(error := RankError(message))
                raise error
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return result

    def _left(self) -> set[int]:
        if not self._store.check(["left"]):
            return set()
        return {rank for rank in range(self.world) if self._store.check([f"left/{rank}"])}

    @contextmanager
    def _naming_unreachable(self, operation: str) -> Iterator[None]:
        try:
            yield
        # A RankError is a RuntimeError too, and needs no other message.
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
