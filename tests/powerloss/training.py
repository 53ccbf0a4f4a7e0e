"""A training run on a disk that writes down what it is asked for, by Python and by native code."""

import random
import shutil
import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from crash.world import Case, World, differing, undisturbed
from powerloss.contents import damages_in
from powerloss.events import Event, Promised, Written
from powerloss.recorder import ForgetfulDisk, HastyDisk, RecordingDisk, nothing_synced
from powerloss.replay import lose_power, put_back
from tensorstow import _native
from tensorstow.base.errors import StowError
from tensorstow.io.files import File
from tensorstow.store import store as store_module
from tensorstow.store.durability import SystemDisk
from tensorstow.store.records import Content, Generation
from tensorstow.store.store import Store


class TrainingDisk(RecordingDisk):
    """Its writes are those that the I/O engine logs, when it has an answer for them.

    So a write that is still in flight at a barrier is behind it in the log.
    """

    def __init__(self) -> None:
        super().__init__()
        self._engine: _native.Engine | None = None
        self._paths: dict[int, Path] = {}
        self._lock = threading.Lock()

    def open(self, engine: _native.Engine, path: Path) -> File:
        if engine is not self._engine:
            self.catch_up()
            engine.log_writes()
            self._engine, self._paths = engine, {}
        file = SystemDisk.open(self, engine, path)
        self._paths[file.number] = path
        return file

    def sync_file(self, file: File) -> None:
        self.catch_up()
        super().sync_file(file)

    def sync_directory(self, path: Path) -> None:
        self.catch_up()
        super().sync_directory(path)

    def end_transaction(self, connection: sqlite3.Connection) -> None:
        self.catch_up()
        super().end_transaction(connection)

    def catch_up(self) -> None:
        """Take note of what was written since the last time."""
        if self._engine is not None:
            with self._lock:  # the copy of the manifest has a thread of its own
                self.events += [
                    Written(self._paths[number], offset, data)
                    for number, offset, data in self._engine.logged_writes()
                ]


class ForgetfulTrainingDisk(TrainingDisk, ForgetfulDisk):
    """Forgets to sync the data files of a commit."""


class HastyTrainingDisk(TrainingDisk, HastyDisk):
    """Ends a commit's transaction before its data files are synced."""


def record_training(
    case: Case, root: Path, disk: TrainingDisk, stops: Sequence[int]
) -> list[Event]:
    """Train to each of ``stops`` in a process of its own, as it were; return the disk's log."""
    commit = Store.commit

    def promising(store: Store, content: Content, *, keep: int | None = None) -> Generation:
        generation = commit(store, content, keep=keep)
        disk.events.append(Promised(content.step))
        return generation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "SystemDisk", lambda: disk)
        patch.setattr(Store, "commit", promising)
        for stop in stops:
            world = World(case, root)
            try:
                world.resume()
                world.train(stop)
                world.close()
            except Exception:  # noqa: BLE001  # what a mutation does to the run itself is not asked
                break
            finally:
                disk.catch_up()
    return disk.events


def judge_training(case: Case, left: dict[Path, bytes], root: Path, promised: int) -> list[str]:
    """Resume from what is left of a run; return what is wrong with it."""
    target = root.with_name("after")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    put_back(left, root, target)
    world = None
    try:
        world = World(case, target)
        step = world.resume()
        if (step or 0) < promised:
            return [f"step {promised} was promised and {step} is there"]
        if step is None:
            return []
        store = world.optimizer._states().storage.store  # type: ignore[attr-defined]
        wrong = [str(damage) for damage in damages_in(store)]
        kept = [name for summary in store.generations() for name in summary.names]
        for which in [*kept, None]:
            world.resume(which)
            wrong += _wrong_with(world, f"{which}, step {world.step}")
        world.train(world.step + 2)
        wrong += _wrong_with(world, f"step {world.step}, trained on from {step}")
    except StowError as error:
        return [repr(error)]
    finally:
        if world is not None:
            world.close()
    return wrong


def _wrong_with(world: World, where: str) -> list[str]:
    case = world.case
    wanted = undisturbed(case.state_format or "split", clips=case.clips)[world.step]
    different = differing(world.facts(), wanted)
    return [f"{where}: {len(different)} things differ, {different[0]}"] if different else []


def crash_training(
    case: Case, events: Sequence[Event], root: Path, points: Sequence[int], seed: int
) -> list[str]:
    """Lose the power at each of ``points``; return what is wrong at the first that shows it."""
    with nothing_synced():
        return _first_damage(case, events, root, points, seed)


def _first_damage(
    case: Case, events: Sequence[Event], root: Path, points: Sequence[int], seed: int
) -> list[str]:
    for point in points:
        past = events[:point]
        promised = max((e.step for e in past if isinstance(e, Promised)), default=0)
        left = lose_power(past, random.Random(seed * 100_003 + point))  # noqa: S311
        wrong = judge_training(case, left, root, promised)
        if wrong:
            return [f"event {point} of {len(events)}: {w}" for w in wrong]
    return []


def barriers_and_others(events: Sequence[Event], others: int, seed: int) -> list[int]:
    """Return the points just before and behind each barrier, and some at random."""
    barriers = [i for i, event in enumerate(events) if not isinstance(event, Written)]
    points = {p for i in barriers for p in (i, i + 1)} | {len(events)}
    dice = random.Random(seed)  # noqa: S311
    points |= {dice.randrange(len(events)) for _ in range(others)}
    return sorted(points)
