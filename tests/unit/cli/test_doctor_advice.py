"""The end of `tensorstow doctor`: OK, or at most three actions, each for one finding."""

import resource
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import CommandLine
from machines import DISK, PROFILE
from tensorstow.base.profile import identify_machine, write_profile
from tensorstow.cli import doctor, doctor_advice
from tensorstow.cli.doctor_advice import actions_of


def directory(path: str, **changes: Any) -> dict[str, Any]:  # noqa: ANN401
    well = {
        "path": path,
        "named_by_user": False,
        "objection": None,
        "free_bytes": 100 << 30,
        "mixed_bytes_per_second": 3e9,
        "has_barriers": True,
    }
    return {**well, **changes}


WELL: dict[str, Any] = {
    "versions": {"torch": "2.13.0+cpu"},
    "accelerator": None,
    "accelerator_driver": None,
    "io": {
        "backend": "uring",
        "asked_for": None,
        "probed": {"uring": None, "threads": None},
        "uring_is_switched_off": False,
    },
    "memlock_bytes": {"soft": 8 << 20, "hard": 8 << 20},
    "directories": [directory("/var/tmp"), directory("/home/me/.cache")],
    "has_profile": True,
}


def but(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the facts of a machine where all is well, with other values at "a__b"."""
    facts = deepcopy(WELL)
    for path, value in changes.items():
        *folders, last = path.split("__")
        inner = facts
        for folder in folders:
            inner = inner[folder]
        inner[last] = value
    return facts


def test_nothing_is_to_do_where_all_is_well() -> None:
    assert actions_of(WELL) == []
    assert actions_of(but(accelerator="1 x cuda", memlock_bytes__soft=None)) == []


BLOCKED = "io_uring is forbidden here (EPERM)"


@pytest.mark.parametrize(
    ("changes", "problem", "action"),
    [
        ({"versions__torch": "2.9.1"}, "torch 2.9.1 is older than 2.11", '"torch>=2.11"'),
        ({"accelerator_driver": "CUDA"}, "cannot use it", "install torch for CUDA"),
        (
            {"io__backend": "threads", "io__probed": {"uring": BLOCKED, "threads": None}},
            f"io_uring is blocked ({BLOCKED})",
            "seccomp=unconfined",
        ),
        (
            {
                "io__probed": {"uring": BLOCKED, "threads": None},
                "io__uring_is_switched_off": True,
            },
            "io_uring is blocked",
            "sudo sysctl kernel.io_uring_disabled=0",
        ),
        (
            {"io__probed": {"uring": "no locked memory (`ulimit -l`)", "threads": None}},
            "io_uring is blocked",
            "ulimit -l unlimited",
        ),
        (
            {"io__backend": None, "io__probed": {"uring": "A", "threads": "B"}},
            "works (uring: A, threads: B)",
            "$TMPDIR",
        ),
        (
            {"accelerator": "1 x cuda"},
            "only 8.0 MiB of memory may be locked",
            "ulimit -l unlimited",
        ),
        ({"has_profile": False}, "was not measured", "tensorstow calibrate"),
        (
            {"directories": [directory("/shm", named_by_user=True, objection="tmpfs")]},
            "/shm cannot hold states",
            "name a directory on a local disk",
        ),
        (
            {"directories": [directory("/shm", objection="tmpfs")]},
            "no directory can hold states",
            "export TMPDIR=DIR",
        ),
        (
            {"directories": [directory("/nvme", named_by_user=True, has_barriers=False)]},
            "/nvme is mounted without barriers",
            "without nobarrier",
        ),
        (
            {"directories": [directory("/full", free_bytes=5 << 20)]},
            "/full has 5.0 MiB free",
            "free some space there, or name a directory",
        ),
        (
            {"directories": [directory("/sata", named_by_user=True, mixed_bytes_per_second=4e8)]},
            "/sata is slow: 400 MB/s",
            "local NVMe drive",
        ),
        (
            {"directories": [directory("/new", named_by_user=True, mixed_bytes_per_second=None)]},
            "not measured: /new",
            "tensorstow calibrate /new",
        ),
    ],
)
def test_each_thing_has_its_action(changes: dict[str, Any], problem: str, action: str) -> None:
    (found,) = actions_of(but(**changes))
    assert problem in found.problem
    assert action in found.action


@pytest.mark.parametrize(
    "changes",
    [
        {"io__probed": {"uring": BLOCKED, "threads": None}, "io__asked_for": "threads"},
        {"accelerator": "1 x cuda", "accelerator_driver": "CUDA", "memlock_bytes__soft": None},
        {"directories": [directory("/var/tmp"), directory("/full", free_bytes=1)]},
        {"directories": [directory("/var/tmp"), directory("/shm", objection="tmpfs")]},
        {"directories": [directory("/sata", mixed_bytes_per_second=4e8)]},
    ],
)
def test_what_hinders_nobody_has_none(changes: dict[str, Any]) -> None:
    assert actions_of(but(**changes)) == []


def test_a_place_that_cannot_be_used_has_another_one_named() -> None:
    named = directory("/shm", named_by_user=True, objection="tmpfs")
    (found,) = actions_of(but(directories=[named, directory("/var/tmp")]))
    assert found.action == "use /var/tmp: dir= or $TMPDIR"


def test_there_are_at_most_three_and_the_gravest_is_first() -> None:
    found = actions_of(
        but(
            versions__torch="2.1",
            accelerator_driver="ROCm",
            io__backend=None,
            has_profile=False,
        )
    )
    words = ("older", "driver", "works")
    assert [word in each.problem for word, each in zip(words, found, strict=True)] == 3 * [True]


def test_files_say_whether_there_is_a_driver_and_a_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, switch = tmp_path / "version", tmp_path / "io_uring_disabled"
    monkeypatch.setattr(doctor_advice, "_DRIVERS", {"CUDA": driver})
    monkeypatch.setattr(doctor_advice, "_URING_SWITCH", switch)
    assert doctor_advice.driver_here() is None
    assert not doctor_advice.uring_is_switched_off()
    driver.touch()
    assert doctor_advice.driver_here() == "CUDA"
    for text, is_off in (("0\n", False), ("1\n", True), ("2\n", True)):
        switch.write_text(text)
        assert doctor_advice.uring_is_switched_off() == is_off


def test_a_run_ends_with_ok_or_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor_advice, "_DRIVERS", {})
    monkeypatch.setattr(doctor, "probe_backend", lambda *_: None)
    monkeypatch.setattr(doctor_advice, "_LEAST_FREE", 0)
    *_, last = cli("doctor", tmp_path).splitlines()
    assert last.strip() == f"tensorstow calibrate {tmp_path}"
    (action,) = cli.json("doctor", tmp_path)["actions"]
    assert action["action"] == f"tensorstow calibrate {tmp_path}"
    measured = PROFILE.but(machine=identify_machine(), directories={str(tmp_path): DISK})
    write_profile(measured)
    *_, last = cli("doctor", tmp_path).splitlines()
    assert last.startswith("OK: this machine is ready.")
    assert cli.json("doctor", tmp_path)["actions"] == []


def test_what_is_measured_here_reaches_the_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    monkeypatch.setattr(doctor, "_accelerator", lambda: "1 x cuda")
    monkeypatch.setattr(doctor, "_device_update", lambda: None)
    problems = " ".join(action["problem"] for action in doctor.examine([])["actions"])
    assert "torch 2.0.1 is older" in problems
    assert "only 64.0 KiB of memory may be locked" in problems
