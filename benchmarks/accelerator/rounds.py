"""The turns that ways take, each kept in a journal when it is over.

A turn that fails says why, and the others go on. One that hangs, or leaves the device unusable,
ends the process with status AGAIN: the caller starts another one, which continues.
"""

import copy
import faulthandler
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import repeat

import torch

from benchmarks.accelerator.crossings import Crossings
from benchmarks.accelerator.journal import Journal
from benchmarks.accelerator.place import Place
from benchmarks.accelerator.transformer import Decoder, elements_of
from benchmarks.accelerator.ways import COMPUTE, Moved, Site, Training, Way, let_go

AGAIN = 75
"""The status of a process that is to be started once more (sysexits.h: a temporary failure)."""
NOT_YET = "not measured yet"
_WARM_UP = 2  # the first step fetches weights and makes states
_MOST_WARM_UP = 5  # and update_on="auto" tries each side twice
_STEPS = 4  # of a run, at most; it is timed as a whole: what runs behind its last step too
_RUN_SECONDS = 15.0  # after which a run is long enough
_RUNS = 2  # of a turn
_ANCHOR = -1  # the turn of what each process begins with


@dataclass
class Outcome:
    """What was seen of one way."""

    way: Way
    seconds: list[float] = field(default_factory=list)
    """A step's, of each run."""
    losses: list[list[float]] = field(default_factory=list)
    """Of each turn."""
    moved: Moved = field(default_factory=Moved)
    """A step's."""
    crossed: tuple[int, int] | None = None
    """Bytes of a step down and up that torch copied; None: they could not be counted."""
    device_bytes: int = 0
    """The most that the device held at once."""
    why: str = ""
    """Why it does not run here; empty: it does."""
    has_failed: bool = False
    """Whether it was tried and ended by an error, a hang or the end of its process."""


class Rounds:
    """Turns of all ways, forth and back."""

    def __init__(
        self,
        ways: Sequence[Way],
        site: Site,
        first: Decoder,
        journal: Journal,
        way_seconds: float | None,
    ) -> None:
        """Begin nothing; ``way_seconds``: after which a turn hangs; None: it never does."""
        self._ways = ways
        self._site = site
        self._first = first
        self._journal = journal
        self._way_seconds = way_seconds
        self._batches = batches_of(site, first)

    def take(self, rounds: int, between: Callable[[], object]) -> None:
        """Take the turns that are not in the journal, ``between`` before each round."""
        if self._is_over(rounds):
            return
        self._take_turn(COMPUTE, _ANCHOR)
        for turn in range(rounds):
            if not self._is_over(turn + 1):
                between()
            for way in self._ways[:: -1 if turn % 2 else 1]:
                if not self._has(way, turn):
                    self._take_turn(way, turn)

    def _is_over(self, rounds: int) -> bool:
        return all(self._has(way, turn) for way in self._ways for turn in range(rounds))

    def _has(self, way: Way, turn: int) -> bool:
        """Return whether a turn was taken, or is not to be taken any more."""
        if way.disk_bytes and turn > 0:
            return True  # a step of theirs may take as long as a turn of the others
        taken = self._journal.of("end", way=way.name, turn=turn)
        return bool(taken) or bool(why_not(way, self._journal))

    def _take_turn(self, way: Way, turn: int) -> None:
        """Make a way's training, take its steps, and let go of it; or write why not."""
        print(f"  turn {turn}: {way.name}", file=sys.stderr, flush=True)
        place = self._site.place
        lacking = _lacking(way, self._site, elements_of(self._first))
        if lacking:
            self._journal.add("end", way=way.name, turn=turn, why=lacking)
            return
        self._journal.add("begin", way=way.name, turn=turn)
        why = ""
        seen = Outcome(way)
        try:
            with self._watched(way, turn):
                self._train(seen, is_first=turn <= 0)
        except Exception as error:  # whatever an import, a compiler or an allocator raises
            if way is COMPUTE:
                raise
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            print(f"  {way.name}: {error}", file=sys.stderr, flush=True)
        self._journal.add(
            "end",
            way=way.name,
            turn=turn,
            why=why,
            seconds=seen.seconds,
            losses=seen.losses,
            moved=asdict(seen.moved),
            crossed=seen.crossed,
            device_bytes=seen.device_bytes,
        )
        _let_go_or_end(place, why)

    @contextmanager
    def _watched(self, way: Way, turn: int) -> Iterator[None]:
        def hang() -> None:
            why = f"did not end in {self._way_seconds:g} s"
            self._journal.add("end", way=way.name, turn=turn, why=why)
            faulthandler.dump_traceback()
            os._exit(AGAIN)

        if self._way_seconds is None:
            yield
            return
        timer = threading.Timer(self._way_seconds, hang)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _train(self, seen: Outcome, *, is_first: bool) -> None:
        place = self._site.place
        place.forget_peak()
        training = seen.way.make(self._site, copy.deepcopy(self._first))
        try:
            ids = iter(self._batches)
            losses = []
            took = 0.0
            while len(losses) < _WARM_UP or not training.is_warm():
                if len(losses) == _MOST_WARM_UP:
                    message = f"its steps still change after {_MOST_WARM_UP}"
                    raise RuntimeError(message)
                start = time.perf_counter()
                losses.append(training.step(next(ids)))
                training.finish()
                took = time.perf_counter() - start
            steps = max(1, min(_STEPS, int(_RUN_SECONDS / took)))
            before = _moved(training)
            for _ in range(_RUNS):
                start = time.perf_counter()
                losses += [training.step(next(ids)) for _ in range(steps)]
                training.finish()
                seen.seconds.append((time.perf_counter() - start) / steps)
            seen.moved = _moved(training).since(before).each(_RUNS * steps)
            seen.device_bytes = place.peak()
            if is_first:
                seen.crossed = _crossed(training, next(ids), may_fail=seen.way.may_fail)
            if training.moved is None and seen.crossed is not None:
                down, up = seen.crossed
                seen.moved = replace(seen.moved, down=down, up=up)
            seen.losses.append([loss.item() for loss in losses])
        finally:
            training.close()


def _let_go_or_end(place: Place, why: str) -> None:
    """Give memory back; where a failure left the device unusable, end the process."""
    try:
        let_go(place)
        place.wait()
    except Exception:
        if not why:
            raise
        print("  the device is unusable now: on in another process", file=sys.stderr, flush=True)
        os._exit(AGAIN)


def why_not(way: Way, journal: Journal) -> str:
    """Return why a way takes no more turns; empty: it does."""
    ends = journal.of("end", way=way.name)
    whys = [entry["why"] for entry in ends if entry["why"]]
    if whys:
        return str(whys[0])
    # What a watchdog does not see. Once may have been the end of the caller's time.
    lost = len(journal.of("begin", way=way.name)) - len(ends)
    return f"the process ended in it, {lost} times" if lost >= 2 else ""


def outcomes_of(ways: Sequence[Way], journal: Journal) -> list[Outcome]:
    """Return what a journal knows; seconds as if one process had measured all ([Note: Processes]).

    A journal has entries of one kind of machine alone: between two kinds compute tells nothing of
    the link and the host.

    Each process's are multiplied by what makes its COMPUTE that of all.
    """
    anchors: dict[int, list[float]] = {}
    for entry in journal.of("end", way=COMPUTE.name):
        anchors.setdefault(entry["process"], []).extend(entry.get("seconds", ()))
    anchors = {process: seconds for process, seconds in anchors.items() if seconds}
    if not anchors:
        return [Outcome(way, why=NOT_YET) for way in ways]
    level = statistics.median(s for seconds in anchors.values() for s in seconds)
    factors = {process: level / statistics.median(each) for process, each in anchors.items()}
    return [_outcome_of(way, journal, factors) for way in ways]


def _outcome_of(way: Way, journal: Journal, factors: dict[int, float]) -> Outcome:
    found = Outcome(way, why=why_not(way, journal))
    if found.why:
        begun = len(journal.of("begin", way=way.name))
        return replace(found, has_failed=begun > 0)
    for entry in journal.of("end", way=way.name):
        factor = factors[entry["process"]]
        found.seconds += [factor * seconds for seconds in entry["seconds"]]
        found.losses += entry["losses"]
        found.device_bytes = max(found.device_bytes, entry["device_bytes"])
        if entry["crossed"] is not None:
            found.crossed = (entry["crossed"][0], entry["crossed"][1])
        moved = Moved(**entry["moved"])
        # What torch copies is counted in the first turn alone.
        found.moved = moved if way.is_ours or entry["crossed"] is not None else found.moved
    found.why = "" if found.seconds else NOT_YET
    return found


def _lacking(way: Way, site: Site, elements: int) -> str:
    """Return what there is too little of; empty: nothing."""
    needed = way.disk_bytes * elements
    free = shutil.disk_usage(site.directory).free
    if needed > free:
        return f"{needed >> 30} GiB of disk are needed, {free >> 30} are free"
    needed = way.host_bytes * elements
    free = available_memory()
    if needed > free:
        return f"{needed >> 30} GiB of host memory are needed, {free >> 30} are free"
    return ""


def available_memory() -> int:
    """Return the bytes that this machine can still give without swapping."""
    with open("/proc/meminfo", encoding="utf-8") as file:  # noqa: PTH123
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    message = "/proc/meminfo has no MemAvailable"
    raise OSError(message)


def _crossed(training: Training, ids: torch.Tensor, *, may_fail: bool) -> tuple[int, int] | None:
    """Take a last step, which is slow; return the bytes down and up that torch copies in it."""
    try:
        with Crossings() as seen:
            training.step(ids)
            training.finish()
    except Exception:  # not every project's code takes a mode; its times are good all the same
        if not may_fail:
            raise
        return None
    return seen.down, seen.up


def _moved(training: Training) -> Moved:
    return Moved() if training.moved is None else training.moved()


def batches_of(site: Site, first: Decoder) -> list[torch.Tensor]:
    """Return ids of every step of a turn, on the device."""
    generator = torch.Generator().manual_seed(1)
    vocabulary, length = first.embedding.num_embeddings, first.positions.num_embeddings
    shape = (site.sequences, length)
    return [
        torch.randint(vocabulary, shape, generator=generator).to(site.place.device)
        for _ in repeat(None, _MOST_WARM_UP + _RUNS * _STEPS + 1)
    ]
