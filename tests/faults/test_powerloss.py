"""The power is lost at every point of a run: every generation that is there is whole."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from powerloss.contents import damages_in, make_content, release_all
from powerloss.events import Created, Event, ManifestCommitted, Promised
from powerloss.recorder import (
    ForgetfulDisk,
    HastyDisk,
    NamelessDisk,
    RecordingDisk,
    UnmadeDisk,
    nothing_synced,
)
from powerloss.replay import lose_power, put_back
from tensorstow.base.errors import StowError
from tensorstow.io.engine import open_engine
from tensorstow.store.space import Extents
from tensorstow.store.store import Store

DIRECTORIES = ("a", "b")
ENGINE = open_engine("threads")


def record_run(root: Path, disk: RecordingDisk, steps: int) -> list[Event]:
    """Commit, pin and unpin for a while; return all that the disk was requested."""
    directories = [root / name for name in DIRECTORIES]
    for directory in directories:
        directory.mkdir(parents=True)
    with Store.open(directories, open_engine("threads"), disk=disk) as store:
        last = None
        for step in range(1, steps + 1):
            content = make_content(store, step)
            store.commit(content)
            disk.events.append(Promised(step))
            if last is not None:  # as training does: what was read is kept until it is replaced
                release_all(store, last)
            last = content
            if step % 3 == 1:
                store.add_snapshot(f"step-{step}")
            if step % 5 == 0:
                store.drop_snapshot(f"step-{step - 1}")
    return disk.events


def judge(left: dict[Path, bytes], root: Path, promised: int) -> list[str]:
    """Open what is left of a run; return what is wrong with it."""
    target = root.with_name("after")
    shutil.rmtree(target, ignore_errors=True)
    for name in DIRECTORIES:
        (target / name).mkdir(parents=True)
    put_back(left, root, target)
    try:
        places = [target / name for name in DIRECTORIES]
        with nothing_synced(), Store.open(places, ENGINE) as store:
            wrong = [str(damage) for damage in damages_in(store)]
            steps = [summary.step for summary in store.generations()]
            if max(steps, default=0) < promised:
                wrong.append(f"step {promised} was promised and {steps} are there")
            store.commit(make_content(store, 99))  # and the run goes on
    except StowError as error:
        return [repr(error)]
    return wrong


def crash_everywhere(
    events: Sequence[Event], root: Path, *, tries: int, every: int = 1
) -> list[str]:
    wrong = []
    for point in range(0, len(events) + 1, every):
        past = events[:point]
        promised = max((e.step for e in past if isinstance(e, Promised)), default=0)
        for seed in range(tries):
            left = lose_power(past, random.Random(1000 * point + seed))  # noqa: S311
            wrong += [f"event {point}, seed {seed}: {w}" for w in judge(left, root, promised)]
            if wrong:
                return wrong
    return wrong


@pytest.mark.parametrize("tries", [1, pytest.param(4, marks=pytest.mark.soak)])
def test_every_generation_survives(tries: int, tmp_path: Path) -> None:
    root = tmp_path / "run"
    events = record_run(root, RecordingDisk(), steps=7)
    assert sum(isinstance(e, Promised) for e in events) == 7
    transactions = [e.path.name for e in events if isinstance(e, ManifestCommitted)]
    assert transactions.count("manifest.sqlite") == 1 + 7 + 3 + 1
    assert transactions.count("manifest-copy.sqlite") == 1 + 7 + 3 + 1
    assert sum(isinstance(e, Created) for e in events) == 4
    assert crash_everywhere(events, root, tries=tries) == []


@pytest.mark.parametrize(
    ("disk", "seen"),
    [
        (ForgetfulDisk, "eneration 1"),
        (HastyDisk, "eneration 1"),
        (UnmadeDisk, "its header, 4096 bytes at offset 0, is damaged"),
        (NamelessDisk, "no such file"),
    ],
)
def test_the_simulation_sees_a_missing_barrier(
    disk: type[RecordingDisk], seen: str, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    events = record_run(root, disk(), steps=3)
    wrong = crash_everywhere(events, root, tries=4)
    assert wrong
    assert seen in wrong[0]


def test_the_simulation_sees_an_extent_that_is_written_too_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    with monkeypatch.context() as patch:
        # What no caller holds is free, whatever the generations say.
        patch.setattr(Extents, "in_use", lambda self, extent: self._held[extent] > 0)
        patch.setattr(Extents, "forget", lambda self, number: self._kept.pop(number))
        events = record_run(root, RecordingDisk(), steps=3)
    wrong = crash_everywhere(events, root, tries=4)
    assert wrong
    assert "differ" in wrong[0]
