"""The cores a process may use, from made-up cgroup trees."""

import os
from pathlib import Path

import pytest

from tensorstow.base.cores import affinity_cores, launcher_cores, process_cores, quota_cores


def cgroup_tree(root: Path, membership: str, files: dict[str, str]) -> Path:
    """Write ``proc/self/cgroup`` and the files below ``sys/fs/cgroup``."""
    for name, text in {"proc/self/cgroup": membership, **files}.items():
        path = root / (name if name.startswith("proc") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def test_no_cgroup_files_mean_no_limit(tmp_path: Path) -> None:
    assert quota_cores(tmp_path) is None
    assert process_cores(tmp_path) == affinity_cores()


def test_version_2_quota(tmp_path: Path) -> None:
    root = cgroup_tree(tmp_path, "0::/job\n", {"job/cpu.max": "150000 100000\n"})
    assert quota_cores(root) == 1.5


def test_version_2_without_a_quota(tmp_path: Path) -> None:
    assert quota_cores(cgroup_tree(tmp_path, "0::/\n", {"cpu.max": "max 100000\n"})) is None


def test_the_tightest_parent_counts(tmp_path: Path) -> None:
    files = {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "400000 100000\n"}
    assert quota_cores(cgroup_tree(tmp_path, "0::/a/b\n", files)) == 2.0


def test_version_2_beside_version_1_is_mounted_one_deeper(tmp_path: Path) -> None:
    files = {"unified/job/cpu.max": "250000 100000\n"}
    assert quota_cores(cgroup_tree(tmp_path, "9:name=systemd:/\n0::/job\n", files)) == 2.5


def test_version_1_quota(tmp_path: Path) -> None:
    files = {"cpu/job/cpu.cfs_quota_us": "300000\n", "cpu/job/cpu.cfs_period_us": "100000\n"}
    root = cgroup_tree(tmp_path, "5:memory:/job\n3:cpu,cpuacct:/job\n", files)
    assert quota_cores(root) == 3.0


def test_version_1_without_a_quota(tmp_path: Path) -> None:
    files = {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert quota_cores(cgroup_tree(tmp_path, "3:cpu:/\n", files)) is None


def test_other_controllers_are_not_asked(tmp_path: Path) -> None:
    files = {"memory/cpu.cfs_quota_us": "100000\n", "memory/cpu.cfs_period_us": "100000\n"}
    assert quota_cores(cgroup_tree(tmp_path, "5:memory:/\n3:cpuset:/\n", files)) is None


def test_a_host_path_inside_a_container_falls_back_to_the_mount(tmp_path: Path) -> None:
    root = cgroup_tree(tmp_path, "0::/../docker/4f2a\n", {"cpu.max": "100000 100000\n"})
    assert quota_cores(root) == 1.0


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", 8), ("350000", 3), ("50000", 1), ("400000", 4), ("9900000", 8)],
)
def test_process_cores(tmp_path: Path, quota: str, cores: int) -> None:
    root = cgroup_tree(tmp_path, "0::/\n", {"cpu.max": f"{quota} 100000\n"})
    assert process_cores(root) == cores


def test_the_cores_of_whoever_started_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launcher_cores() == os.sched_getaffinity(os.getppid())
    monkeypatch.setattr(os, "getppid", lambda: 0)
    assert launcher_cores() == frozenset()
    monkeypatch.setattr(os, "getppid", lambda: 2**22 + 1)  # more than there can be
    assert launcher_cores() == frozenset()
