"""One bit, one value or one row of a store is another: found out by name, or harmless."""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from attacks.flips import (
    COPIES,
    DATA,
    LOG,
    MANIFEST,
    change,
    changes,
    copy,
    directories,
    drop_copy,
    facts,
    flips,
    make_run,
    some_bits,
    spread_bits,
)
from tensorstow.base.errors import DamageError
from tensorstow.io.engine import open_engine
from tensorstow.store.store import Store


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("attacks")
    make_run(root / "rest", root / "live")
    for state in ("rest", "live"):
        copy(root / state, root / f"{state} alone")
        drop_copy(root / f"{state} alone")
    return {path.name: path for path in root.iterdir()}


@pytest.mark.parametrize(
    ("state", "name"),
    [("rest alone", MANIFEST), ("live alone", LOG), *(("rest", name) for name in DATA)],
)
def test_a_flipped_bit_is_found_or_harmless(
    run: dict[str, Path], state: str, name: str, tmp_path: Path
) -> None:
    outcomes = list(flips(run[state], tmp_path, name, some_bits(run[state] / name, 16, seed=7)))
    assert [o for o in outcomes if o.startswith("WRONG")] == []
    assert [o for o in outcomes if not o.startswith("the same")] != []


@pytest.mark.parametrize(
    ("state", "name"),
    [(state, name) for state in ("rest", "live") for name in (MANIFEST, LOG, *COPIES)],
)
def test_no_flipped_bit_of_a_manifest_or_its_copy_loses_anything(
    run: dict[str, Path], state: str, name: str, tmp_path: Path
) -> None:
    """`make soak` flips far more."""
    if (run[state] / name).exists():  # at rest there are no logs
        bits = spread_bits(run[state] / name, 14)
        outcomes = list(flips(run[state], tmp_path, name, bits))
        assert [o for o in outcomes if not o.startswith("the same")] == []


def test_every_value_of_every_type(run: dict[str, Path], tmp_path: Path) -> None:
    copy(run["rest"], tmp_path / "golden")
    wanted = facts(tmp_path / "golden")
    everything = changes(run["rest"])
    chosen = random.Random(3).sample(everything, 30)  # noqa: S311
    chosen += [what for what in everything if what[0].startswith("DELETE")]
    outcomes = {what: change(run["rest"], tmp_path / "it", what, wanted) for what in chosen}
    bad = {what: o for what, o in outcomes.items() if o not in {"DamageError", "refused"}}
    assert bad == {}
    assert "DamageError" in outcomes.values()


@pytest.mark.parametrize("cut", ["gone", "empty", "halved"])
def test_a_log_that_is_not_whole_loses_nothing_in_silence(
    cut: str, run: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "run"
    copy(run["live alone"], root)
    log = root / LOG
    data = log.read_bytes()
    log.write_bytes(data[: len(data) // 2 if cut == "halved" else 0])
    if cut == "gone":
        log.unlink()
    with pytest.raises(DamageError, match=r"has lost what was reported") as caught:
        Store.open(directories(root), open_engine("threads"))
    assert "knows generation 7 (step 7) as the newest" in str(caught.value)
    assert "tensorstow run recover" in str(caught.value)


def test_a_manifest_that_is_gone_is_no_new_run(run: dict[str, Path], tmp_path: Path) -> None:
    for name, act in (("empty", lambda p: p.write_bytes(b"")), ("gone", Path.unlink)):
        root = tmp_path / name
        copy(run["rest alone"], root)
        act(root / MANIFEST)
        with pytest.raises(DamageError, match=r"generation 7 \(step 7\).*no manifest next to it"):
            Store.open(directories(root), open_engine("threads"))


@pytest.mark.parametrize("name", [MANIFEST, LOG])
@pytest.mark.parametrize("act", [Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_manifest_or_a_log_that_is_gone_loses_nothing(
    act: Callable[[Path], object], name: str, run: dict[str, Path], tmp_path: Path
) -> None:
    copy(run["live"], tmp_path / "golden")
    wanted = facts(tmp_path / "golden")
    root = tmp_path / "run"
    copy(run["live"], root)
    act(root / name)
    assert facts(root) == wanted


def test_an_older_copy_of_a_data_file_is_told(run: dict[str, Path], tmp_path: Path) -> None:
    root = tmp_path / "run"
    copy(run["rest"], root)
    shutil.copy(root / DATA[1], tmp_path / "older")
    with Store.open(directories(root), open_engine("threads")) as store:
        for k in range(3):
            store.add_snapshot(f"again-{k}")
    shutil.copy(tmp_path / "older", root / DATA[1])
    with pytest.raises(DamageError, match=r"states-1\.bin, an older copy by that"):
        Store.open(directories(root), open_engine("threads"))
