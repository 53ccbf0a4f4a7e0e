"""A manifest whose rows were altered and whose digests are right: an error, or the same run."""

from collections import Counter
from pathlib import Path

from attacks.rows import outcomes


def test_some_alterations(tmp_path: Path) -> None:
    """`make soak` tries far more."""
    found = outcomes(tmp_path, 30, seed=11)
    assert len(found) == 30
    assert [pair for pair in found if pair[1].startswith("WRONG")] == []
    kinds = Counter(outcome.split(":")[0] for _, outcome in found)
    assert kinds["DamageError"] > 10
