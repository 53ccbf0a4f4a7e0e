"""A directory has a pipe, a device or a sparse file of a TiB under a name that is read.

All of it ends by an error of ours that names the file, within seconds.
"""

import json
import shutil
from pathlib import Path

import pytest

import children
from attacks.planted import ATTEMPTS, LOADS, NEVER_LOADED, PLANTS, make_plants, train

MANIFEST = [f"a/manifest.sqlite{end}" for end in ("", "-wal", "-shm", "-journal")]
COPY = [f"a/manifest-copy.sqlite{end}" for end in ("", "-wal", "-shm", "-journal")]
DATA = ["a/states-0.bin", "b/states-1.bin"]
LOCKS = ["a/lock", "b/lock"]
UNREAD = {
    "inspect": {*COPY, "b/lock"},
    "scrub": {*COPY, "b/lock"},
    "clean": {*COPY},
    "recover": {"a/manifest.sqlite-shm", "a/manifest-copy.sqlite-shm"},
}
"""Files that a command does not open: it ends as if they were not there."""
HARMLESS = {
    ("inspect", "sparse"): {*DATA},
    ("clean", "sparse"): {*DATA},
    **{(what, "grown"): {*DATA} for what in ATTEMPTS},
}
"""Files of which the first page is read: those of another run, and those with a free end."""


NAMES = [*MANIFEST, *COPY, *DATA, *LOCKS]
Outcomes = dict[tuple[str, str], list[tuple[str, str | None]]]
"""By attempt and plant: the name of each file, and the error."""
pytestmark = pytest.mark.timeout(400)  # the first test makes all attempts


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plants = tmp_path_factory.mktemp("planted") / "plants"
    make_plants(plants)
    return plants


@pytest.fixture(scope="module")
def attempts(plants: Path) -> Outcomes:
    intact, run = plants.parent / "intact", plants.parent / "run"
    train(run)  # the run's directories are in its manifest
    shutil.copytree(run, intact)
    return outcomes(plants, intact, run, *NAMES)


@pytest.fixture(scope="module")
def loads(plants: Path) -> Outcomes:
    return outcomes(plants, plants.parent / "loads")


def outcomes(*words: str | Path) -> Outcomes:
    """Try all in one other process, which ends if one attempt takes too long."""
    ended = children.run("-m", "attacks.planted", *words, timeout=380)
    tried: Outcomes = {}
    for what, kind, name, error in map(json.loads, ended.stdout.splitlines()):
        tried.setdefault((what, kind), []).append((name, error))
    return tried


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("what", ATTEMPTS)
def test_nothing_is_waited_for_or_read_without_end(
    attempts: Outcomes, what: str, kind: str
) -> None:
    error_of = dict(attempts[what, kind])
    assert list(error_of) == NAMES
    unread = UNREAD.get(what, set()) | HARMLESS.get((what, kind), set())
    assert {name for name, error in error_of.items() if error is None} == unread
    errors = {name: str(error) for name, error in error_of.items() if name not in unread}
    assert {n: e for n, e in errors.items() if Path(n).name not in e} == {}
    if kind in {"pipe", "zeros"}:
        expected = "where a regular file is expected"
        assert {n: e for n, e in errors.items() if expected not in e} == {}


@pytest.mark.parametrize("kind", PLANTS[:3])
@pytest.mark.parametrize("what", LOADS)
def test_no_load_waits_or_reads_without_end(loads: Outcomes, what: str, kind: str) -> None:
    assert loads[what, kind]
    used = [(name, error) for name, error in loads[what, kind] if name != NEVER_LOADED]
    assert [(n, e) for n, e in used if e is None or Path(n).name not in e] == []
