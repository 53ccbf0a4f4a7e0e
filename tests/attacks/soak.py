"""Every attack at size, in `make soak`: flips, values, rows, system calls that fail, texts."""

import argparse
import errno as codes
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from attacks.flips import (
    DATA,
    LOG,
    MANIFEST,
    change,
    changes,
    copy,
    drop_copy,
    facts,
    flips,
    make_run,
    some_bits,
    spread_bits,
)
from attacks.opening import ACTS, OpeningFaults
from attacks.rows import outcomes
from attacks.texts import attack


def flipped(place: Path, count: int, seed: int) -> Iterator[str]:
    """Flip ``count`` bits of each file of a run."""
    make_run(place / "rest", place / "live")
    for state, name in (("rest", MANIFEST), ("live", MANIFEST), ("live", LOG), *_data("rest")):
        bits = some_bits(place / state / name, count, seed)
        yield from flips(place / state, place / "target", name, bits)
        if name not in DATA:
            bits = spread_bits(place / state / name, count)
            for outcome in flips(place / state, place / "target", name, bits):
                yield outcome if outcome.startswith("the same") else f"WRONG: {outcome}"
    for state in ("rest", "live"):
        drop_copy(place / state)
    for state, name in (("rest", MANIFEST), ("live", MANIFEST), ("live", LOG)):
        bits = some_bits(place / state / name, count, seed)
        yield from flips(place / state, place / "target", name, bits)


def changed(place: Path) -> Iterator[str]:
    """Change every value of the manifest to one of every type."""
    make_run(place / "rest", place / "live")
    copy(place / "rest", place / "golden")
    wanted = facts(place / "golden")
    for what in changes(place / "rest"):
        outcome = change(place / "rest", place / "it", what, wanted)
        yield outcome if outcome != "the same" else f"WRONG: {str(what)[:200]} made no difference"


def refused(place: Path) -> Iterator[str]:
    """Let every call of the system fail while a run is opened."""
    with pytest.MonkeyPatch.context() as patch:
        faults = OpeningFaults(place, patch)
        for act in ACTS:
            for at in range(faults.count(act)):
                for code in (codes.EIO, codes.ENOSPC):
                    yield faults.fail(act, at, code)


def altered(place: Path, count: int, seed: int) -> Iterator[str]:
    """Alter rows and compute their digests anew, then resume; each in a process of its own."""
    for name, outcome in outcomes(place, count, seed):
        yield outcome if not outcome.startswith("WRONG") else f"{outcome} ({name})"


def _data(state: str) -> list[tuple[str, str]]:
    return [(state, name) for name in DATA]


def main() -> None:
    """Attack as often as was requested; exit by what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    asked = parser.parse_args()
    print(f"seed {asked.seed}", flush=True)  # noqa: T201
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tensorstow-attacks-", dir=Path.cwd()) as name:
        places = [Path(name, str(k)) for k in range(5)]
        for place in places:
            place.mkdir()
        wrong += _tell("flips", flipped(places[0], asked.count, asked.seed))
        wrong += _tell("values", changed(places[1]))
        wrong += _tell("refusals", refused(places[2]))
        wrong += _tell("rows", altered(places[4], 5 * asked.count, asked.seed))
        wrong += _tell("texts", (f"WRONG: {w}" for w in attack(places[3], asked.count, asked.seed)))
    if wrong:
        sys.exit("\n".join(wrong))


def _tell(name: str, outcomes: Iterable[str]) -> list[str]:
    found = list(outcomes)
    kinds = Counter(outcome.split(" (")[0].split(":")[0] for outcome in found)
    print(f"{name}: {dict(kinds)}", flush=True)  # noqa: T201
    return [outcome for outcome in found if outcome.startswith("WRONG")]


if __name__ == "__main__":
    main()
