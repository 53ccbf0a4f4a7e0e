"""What other programs took of our cores."""

import os
import time
from pathlib import Path

import pytest

from demo import cpu_load
from demo.cpu_load import OtherLoad, busy_seconds

TICK = os.sysconf("SC_CLK_TCK")
CORES = sorted(os.sched_getaffinity(0))


def stat(path: Path, user: int, idle: int = 0, steal: int = 0) -> Path:
    lines = ["cpu  9 9 9 9 9 9 9 9 0 0"]
    lines += [f"cpu{core} {user} 0 0 {idle} 0 0 0 {steal} 0 0" for core in CORES]
    lines += [f"cpu{CORES[-1] + 1} 7777 0 0 0 0 0 0 0 0 0", "intr 1 2 3"]  # not ours
    path.write_text("\n".join(lines))
    return path


def test_idle_time_and_cores_of_others_do_not_count(tmp_path: Path) -> None:
    found = busy_seconds(stat(tmp_path / "stat", user=2 * TICK, idle=500, steal=TICK))
    assert found == 3 * len(CORES)


@pytest.mark.parametrize("text", [None, "cpu 1 2 3\n"])
def test_what_the_kernel_does_not_tell_is_unknown(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert busy_seconds(tmp_path / "stat") is None
    assert OtherLoad(tmp_path / "stat").share() is None


def test_what_is_not_ours_is_the_share_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_load, "quota_cores", lambda: None)
    monkeypatch.setattr(cpu_load, "affinity_cores", lambda: len(CORES))
    seconds = iter([100.0, 110.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    ours = iter([1.0, 1.0 + 4.0 * len(CORES)])
    monkeypatch.setattr(cpu_load, "our_seconds", lambda: next(ours))
    path = stat(tmp_path / "stat", user=0)
    others = OtherLoad(path)
    stat(path, user=7 * TICK)  # 7 of 10 seconds busy, 4 of them with us
    assert others.share() == pytest.approx(0.3)


def test_a_quota_makes_it_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_load, "quota_cores", lambda: 1.5)
    assert OtherLoad().share() is None
