"""Whatever the disk answers while a run is opened or looked at: by name, with path and advice."""

import errno as codes
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from attacks.opening import ACTS, OpeningFaults, begin, export, go_on, look, recovery, scratch
from tensorstow.base.errors import DirectoryError


def test_a_run_on_a_full_disk_is_opened_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = OpeningFaults(tmp_path, monkeypatch)
    for act in (go_on, look):
        attack.fill(act)
    for act in (begin, scratch, export, recovery):
        with pytest.raises(DirectoryError, match=r"No space left.* Free some space") as caught:
            attack.fill(act)
        assert str(tmp_path / "work") in str(caught.value)


@pytest.mark.parametrize("act", ACTS)
def test_some_calls_that_fail(
    act: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make soak` lets each of them fail."""
    attack = OpeningFaults(tmp_path, monkeypatch)
    total = attack.count(act)
    assert total > 3
    dice = random.Random(act.__name__)  # noqa: S311
    outcomes = [
        attack.fail(act, at, dice.choice([codes.EIO, codes.ENOSPC]))
        for at in dice.sample(range(total), min(total, 8))
    ]
    assert [told for told in outcomes if told.startswith("WRONG")] == []


@pytest.mark.parametrize("code", [codes.EIO, codes.ENOSPC])
def test_what_a_run_looks_at_last_is_named_too(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After it has its states it looks for copies that were not completed; an export for lists."""
    attack = OpeningFaults(tmp_path, monkeypatch)
    total = attack.count(go_on)
    outcomes = [attack.fail(go_on, at, code) for at in range(total - 12, total)]
    total = attack.count(export)
    outcomes += [attack.fail(export, at, code) for at in range(total // 2, total // 2 + 8)]
    assert [told for told in outcomes if told.startswith("WRONG")] == []
