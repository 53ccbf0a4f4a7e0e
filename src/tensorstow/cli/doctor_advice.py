"""What to do about what `tensorstow doctor` found: at most three actions, the gravest first."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

from tensorstow.base.cores import read_or_empty
from tensorstow.base.profile import WORTH_OFFLOADING
from tensorstow.base.sizes import format_bytes
from tensorstow.cli.output import format_rate

_MOST = 3
_DRIVERS: Mapping[str, Path] = {
    "CUDA": Path("/proc/driver/nvidia/version"),
    "ROCm": Path("/opt/rocm"),  # not amdgpu's: processors with graphics have that one too
}
"""Files that a GPU's driver has, by the build of torch that uses it."""
_URING_SWITCH = Path("/proc/sys/kernel/io_uring_disabled")
_RAISE_LOCKED = "ulimit -l unlimited (in Docker: --ulimit memlock=-1)"
_LEAST_FREE = 1 << 30
"""Bytes that a directory for states has at least: fewer hold no model worth offloading."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something that is not as it should be, and the command or setting that changes it."""

    problem: str
    action: str


def driver_here() -> str | None:
    """Return the build of torch that this machine's GPU needs; None: it has no GPU's driver."""
    return next((build for build, path in _DRIVERS.items() if path.exists()), None)


def uring_is_switched_off() -> bool:
    """Return whether the kernel's own setting forbids io_uring."""
    return read_or_empty(_URING_SWITCH).strip() in {"1", "2"}


def actions_of(facts: Mapping[str, Any]) -> list[Action]:
    """Return at most three actions about what ``doctor.examine`` found, the gravest first."""
    actions = [
        *_about_torch(facts),
        *_about_directories(facts),
        *_about_transfers(facts),
        *_about_rates(facts),
    ]
    return actions[:_MOST]


def _about_torch(facts: Mapping[str, Any]) -> Iterator[Action]:
    torch, least = facts["versions"]["torch"], _least_torch()
    if _numbers(torch) < _numbers(least):
        problem = f"torch {torch} is older than {least}, the oldest that is supported"
        yield Action(problem, f'pip install --upgrade "torch>={least}"')
    build = facts["accelerator_driver"]
    if facts["accelerator"] is None and build is not None:
        problem = f"a GPU's driver is here, and torch {torch} cannot use it"
        action = f"install torch for {build} (https://pytorch.org/get-started/locally/)"
        yield Action(problem, f"{action}; in a container, start it with access to the GPU")


def _about_directories(facts: Mapping[str, Any]) -> Iterator[Action]:
    reports: Sequence[Mapping[str, Any]] = facts["directories"]
    usable = [d for d in reports if d["objection"] is None and not _is_full(d)]
    other = f"use {usable[0]['path']}" if usable else "name a directory on a local disk"
    for report in (d for d in reports if d["named_by_user"] and d["objection"] is not None):
        yield Action(f"{report['path']} cannot hold states", f"{other}: dir= or $TMPDIR")
    for report in (d for d in usable if d["named_by_user"] and d["has_barriers"] is False):
        problem = f"{report['path']} is mounted without barriers: a loss of power may take commits"
        yield Action(problem, "mount it without nobarrier and barrier=0")
    for report in (d for d in reports if d["objection"] is None and _is_full(d)):
        if report["named_by_user"] or not usable:
            problem = f"{report['path']} has {format_bytes(report['free_bytes'])} free"
            yield Action(problem, f"free some space there, or {other}")
    if all(d["objection"] is not None and not d["named_by_user"] for d in reports):
        problem = "no directory can hold states"
        yield Action(problem, "export TMPDIR=DIR, a directory on a local disk")
    for report in usable:
        rate = report["mixed_bytes_per_second"]
        if report["named_by_user"] and rate is not None and rate < WORTH_OFFLOADING:
            problem = f"{report['path']} is slow: {format_rate(rate)}, read and written at once"
            yield Action(problem, "use a directory on a local NVMe drive")


def _is_full(report: Mapping[str, Any]) -> bool:
    free = report["free_bytes"]
    return free is not None and free < _LEAST_FREE


def _about_transfers(facts: Mapping[str, Any]) -> Iterator[Action]:
    io, locked = facts["io"], facts["memlock_bytes"]["soft"]
    if io["backend"] is None:
        reasons = ", ".join(f"{name}: {why}" for name, why in io["probed"].items())
        yield Action(f"no way of reading and writing works ({reasons})", "name another $TMPDIR")
    elif io["probed"].get("uring") is not None and io["asked_for"] != "threads":
        problem = f"io_uring is blocked ({io['probed']['uring']}): transfers take more CPU time"
        action = "in Docker: --security-opt seccomp=unconfined; elsewhere: Linux 5.6 or newer"
        if io["uring_is_switched_off"]:
            action = "sudo sysctl kernel.io_uring_disabled=0"
        elif "ulimit -l" in io["probed"]["uring"]:
            action = _RAISE_LOCKED
        yield Action(problem, action)
    if facts["accelerator"] is not None and locked is not None:
        problem = (
            f"only {format_bytes(locked)} of memory may be locked: copies to the GPU are slower"
        )
        yield Action(problem, _RAISE_LOCKED)


def _about_rates(facts: Mapping[str, Any]) -> Iterator[Action]:
    named = [d for d in facts["directories"] if d["named_by_user"] and d["objection"] is None]
    unmeasured = [d["path"] for d in named if d["mixed_bytes_per_second"] is None]
    if not facts["has_profile"]:
        command = " ".join(["tensorstow calibrate", *unmeasured])
        yield Action("this machine was not measured: plans have no seconds", command)
    elif unmeasured:
        paths = " ".join(unmeasured)
        yield Action(f"not measured: {paths}", f"tensorstow calibrate {paths}")


def _least_torch() -> str:
    """Return the oldest version of torch that the package's metadata allows."""
    needed = (re.match(r"torch>=([\d.]+)", line) for line in requires("tensorstow") or ())
    return next((match[1] for match in needed if match), "0")


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()
