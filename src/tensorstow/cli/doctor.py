"""`tensorstow doctor`: kernel, threads, I/O backend and directories of this machine, and why."""

import argparse
import contextlib
import os
import platform
import re
import resource
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tensorstow.base.core_share import LocalRanks, part
from tensorstow.base.cores import affinity_cores, quota_cores, read_or_empty
from tensorstow.base.directories import (
    check_directory,
    default_candidates,
    inspect_directory,
    resolve_path,
)
from tensorstow.base.errors import DirectoryError, OptionError
from tensorstow.base.launch import launched
from tensorstow.base.mounts import write_cache_of
from tensorstow.base.nodes import read_nodes
from tensorstow.base.profile import Profile, read_profile
from tensorstow.base.sizes import format_bytes, format_count
from tensorstow.cli.doctor_advice import actions_of, driver_here, uring_is_switched_off
from tensorstow.cli.doctor_hardware import examine_hardware, notes_of
from tensorstow.cli.output import format_rate, make_console, print_facts, print_json, print_line
from tensorstow.io.engine import BACKENDS, DEPTH, choose_backend, probe_backend
from tensorstow.io.files import accepts_direct
from tensorstow.io.local_ranks import local_ranks
from tensorstow.io.local_share import accelerator_nodes, share_here, usable_cores
from tensorstow.states.kernels import prepare_kernels
from tensorstow.states.layout import Family
from tensorstow.step.update_rule import rule_on

_MOST_RANKS = 4096
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CACHES = {
    "write back": ", its cache is flushed by each commit",
    "write through": ", never flushed: it must keep its cache when power is lost",
}
_LOCAL_LOCKS = ", locks do not reach other machines: use it on one"
_LABEL_COLUMNS = 16
_CANDIDATE_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """The result of examining one directory."""

    path: str
    named_by_user: bool
    objection: str | None
    """Why it cannot hold states; None if it can."""
    filesystem: str | None = None
    device: str | None = None
    free_bytes: int | None = None
    takes_direct_io: bool | None = None
    """Whether transfers bypass the page cache; None: it could not be tried."""
    read_bytes_per_second: float | None = None
    """Rate that `tensorstow calibrate` measured; None: not measured."""
    write_bytes_per_second: float | None = None
    mixed_bytes_per_second: float | None = None
    """Read and written at once, both together."""
    verdict: str | None = None
    """Whether the directory is worth offloading to."""
    has_barriers: bool | None = None
    """Whether the filesystem passes a sync on to its drive."""
    has_local_locks: bool = False
    """Whether other machines that have it mounted do not see this one's locks."""
    write_cache: str | None = None
    """What the kernel believes of the drive: "write back" caches are flushed by a sync, "write
    through" ones are not. None: it is not one drive."""


def run(options: argparse.Namespace) -> int:
    """Run the command; return its exit status: 1 if a named directory cannot hold states."""
    facts = examine([*options.named, *options.directory], options.local_ranks)
    if options.ranks:
        # Importing FSDP2 takes half a second.
        from tensorstow.cli.doctor_machines import run_on_ranks  # noqa: PLC0415

        return run_on_ranks(facts, launched(), as_json=options.json)
    if options.json:
        print_json(facts)
    else:
        _print_facts(facts)
    return int(any(d["named_by_user"] and d["objection"] for d in facts["directories"]))


def examine(named: list[str], ranks: int | None = None) -> dict[str, Any]:
    """Return everything that the command prints, as plain values, for ``ranks`` on the machine."""
    if ranks is not None and not 1 <= ranks <= _MOST_RANKS:
        message = f"--local-ranks {ranks} was given: it is a number of ranks, 1 to {_MOST_RANKS}."
        raise OptionError(message)
    launched = local_ranks()
    local = launched if ranks is None else LocalRanks(ranks, None)
    directories = [*((Path(d), True) for d in named), *((c, False) for c in default_candidates())]
    kernels = prepare_kernels()
    profile = read_profile()
    facts = {
        "versions": {
            "tensorstow": version("tensorstow"),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "linux": platform.release(),
        },
        "accelerator": _accelerator(),
        "accelerator_driver": driver_here(),
        "device_update": _device_update(),
        "kernel": {"isa": kernels.isa, "supported": list(reversed(kernels.supported))},
        "threads": {
            "update": kernels.threads,
            "usable_cores": usable_cores(),
            "affinity_cores": affinity_cores(),
            "quota_cores": quota_cores(),
            "local_ranks": launched.count,
        },
        "numa": {
            "nodes": [asdict(node) for node in read_nodes()],
            "rank": local.rank,
            "ranks": [_share(LocalRanks(local.count, rank)) for rank in range(local.count)],
        },
        "io": _backends(),
        "memlock_bytes": _memlock(),
        "transparent_huge_pages": huge_pages(),
        "directories": [
            asdict(look_at(path, named_by_user=is_named, profile=profile))
            for path, is_named in _distinct(directories)
        ],
        "has_profile": profile is not None,
        "hardware": examine_hardware(),
    }
    return {**facts, "actions": [asdict(action) for action in actions_of(facts)]}


def look_at(path: Path, *, named_by_user: bool, profile: Profile | None = None) -> DirectoryReport:
    """Examine one directory; its objection is the reason why it cannot hold states."""
    try:
        facts = inspect_directory(path)
    except DirectoryError as error:
        return DirectoryReport(str(path), named_by_user, str(error))
    objection, direct = None, None
    try:
        check_directory(path)
    except DirectoryError as error:
        objection = str(error)
    if facts.is_writable:
        direct = accepts_direct(facts.path)
    rates = None if profile is None else profile.rates_of(facts.path)
    return DirectoryReport(
        path=str(facts.path),
        named_by_user=named_by_user,
        objection=objection,
        filesystem=facts.mount.filesystem,
        device=facts.mount.device,
        free_bytes=facts.free_bytes,
        takes_direct_io=direct,
        read_bytes_per_second=None if rates is None else rates.read,
        write_bytes_per_second=None if rates is None else rates.write,
        mixed_bytes_per_second=None if rates is None else rates.mixed,
        verdict=None if rates is None else rates.verdict,
        has_barriers=facts.mount.has_barriers,
        has_local_locks=facts.mount.has_local_locks,
        write_cache=write_cache_of(facts.mount),
    )


def _share(local: LocalRanks) -> dict[str, Any]:
    """Return the cores, threads and I/O depth of one of the machine's ranks."""
    devices = accelerator_nodes(initialise=True)
    if devices is not None and local.rank is not None:
        devices = replace(devices, current=local.rank % len(devices.nodes))
    share = share_here(local=local, devices=devices)
    return {
        "rank": local.rank,
        "threads": share.threads,
        "nodes": share.nodes,
        "cores": share.cores,
        "io_depth": part(DEPTH, local.count, local.rank),
    }


def huge_pages(setting: Path = _HUGE_PAGES) -> str | None:
    """Return the system's setting (always, madvise, never); None if it has none."""
    match = re.search(r"\[(\w+)\]", read_or_empty(setting))
    return match[1] if match else None


def _distinct(candidates: list[tuple[Path, bool]]) -> list[tuple[Path, bool]]:
    """Return the candidates without repeated directories."""
    first: dict[Path, tuple[Path, bool]] = {}
    for path, is_named in candidates:
        key = path
        with contextlib.suppress(DirectoryError):  # look_at reports the reason
            key = resolve_path(path)
        first.setdefault(key, (path, is_named))
    return list(first.values())


def _backends() -> dict[str, Any]:
    try:
        chosen = choose_backend().name
    except OSError:  # "probed" has the reason of each
        chosen = None
    return {
        "backend": chosen,
        "asked_for": os.environ.get("TENSORSTOW_IO") or None,
        "probed": {name: probe_backend(name) for name in BACKENDS},
        "uring_is_switched_off": uring_is_switched_off(),
    }


def _accelerator() -> str | None:
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else f"{torch.accelerator.device_count()} x {device.type}"


def _device_update() -> dict[str, str] | None:
    """Return which rule updates on the accelerator, and why it is not the fused kernel."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return None
    choice = rule_on(device, Family(torch.float32, amsgrad=False))
    return {"rule": choice.rule.name, "why_not_fused": choice.why_not_fused}


def _memlock() -> dict[str, int | None]:
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return {"soft": soft, "hard": hard}


def _print_facts(facts: dict[str, Any]) -> None:
    console = make_console()
    print_facts(console, _lines(facts), _LABEL_COLUMNS)
    console.print("\n[bold]directories for scratch files[/]")
    for report in facts["directories"]:
        is_usable = "  yes" if report["objection"] is None else "  no"
        print_facts(console, [(is_usable, _describe(report))], _CANDIDATE_COLUMNS)
    console.print()
    for note in notes_of(facts["hardware"]):
        print_line(console, f"Note: {note}\n")
    if not facts["actions"]:
        alone = "" if facts["accelerator"] else " No GPU was found: models compute on the CPU."
        print_line(console, f"OK: this machine is ready.{alone}")
        return
    console.print("[bold]what to do[/]")
    for number, action in enumerate(facts["actions"], start=1):
        print_line(console, f"  {number}. {action['problem']}\n     {action['action']}")


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    kernel, threads, io, lock = (facts[k] for k in ("kernel", "threads", "io", "memlock_bytes"))
    (_, tensorstow_version), *other_versions = facts["versions"].items()
    quota = _cores(threads["quota_cores"])
    why = (
        f"affinity {format_count(threads['affinity_cores'], 'core')}, cgroup quota {quota},"
        f" {format_count(threads['local_ranks'], 'rank')} on this machine"
    )
    probed = (
        f"{n} {'works' if why is None else f'does not: {why}'}" for n, why in io["probed"].items()
    )
    asked = f" (asked for {io['asked_for']} in $TENSORSTOW_IO)" if io["asked_for"] else ""
    pages = facts["transparent_huge_pages"]
    advice = {"never": " (our buffers get small pages: more TLB misses)", None: " (not offered)"}
    return [
        (
            "tensorstow",
            f"{tensorstow_version}, "
            + ", ".join(f"{name} {number}" for name, number in other_versions),
        ),
        ("accelerator", facts["accelerator"] or "none that torch can use"),
        *_device_update_lines(facts["device_update"]),
        ("CPU kernel", f"{kernel['isa']} (this CPU runs {', '.join(kernel['supported'])})"),
        ("threads", f"{threads['update']} ({why})"),
        ("NUMA nodes", _nodes(facts["numa"]["nodes"])),
        *[("" if turn else "ranks", _rank(share)) for turn, share in enumerate(_runs(facts))],
        ("I/O backend", f"{io['backend'] or 'none works'}{asked}; probed: {', '.join(probed)}"),
        ("memlock", f"{_limit(lock['soft'])} (at most {_limit(lock['hard'])}; `ulimit -l`)"),
        ("huge pages", f"{pages or 'none'}{advice.get(pages, ' (our buffers use them)')}"),
    ]


def _device_update_lines(choice: dict[str, str] | None) -> list[tuple[str, str]]:
    if choice is None:
        return []
    why = choice["why_not_fused"]
    return [("device updates", choice["rule"] + (f" ({why})" if why else ""))]


def _nodes(nodes: list[dict[str, Any]]) -> str:
    descriptions = (f"{node['number']} (cores {_ranges(node['cores'])})" for node in nodes)
    return ", ".join(descriptions) or "not reported by this system"


def _runs(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the shares of all ranks; adjacent equal shares are one."""
    runs: list[dict[str, Any]] = []
    for share in facts["numa"]["ranks"]:
        last = runs[-1] if runs else {}
        if all(last.get(key) == value for key, value in share.items() if key != "rank"):
            last["last"] = share["rank"]
        else:
            runs.append({**share, "last": share["rank"]})
    return runs


def _rank(share: dict[str, Any]) -> str:
    who = _ranges(range(share["rank"], share["last"] + 1))
    nodes = " and ".join(str(number) for number in share["nodes"])
    location = f"on node {nodes} (cores {_ranges(share['cores'])})" if nodes else "on any core"
    threads = format_count(share["threads"], "thread")
    suffix = " each" if share["last"] > share["rank"] else ""
    return (
        f"{who}: {threads}{suffix} {location}, {format_count(share['io_depth'], 'block')} in flight"
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Return sorted numbers as the kernel writes them: 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(str(end) for end in run) for run in runs)


def _cores(quota: float | None) -> str:
    if quota is None:
        return "none"
    return format_count(int(quota), "core") if quota == int(quota) else f"{quota:g} cores"


def _limit(nbytes: int | None) -> str:
    return "unlimited" if nbytes is None else format_bytes(nbytes)


def _describe(report: dict[str, Any]) -> str:
    if report["filesystem"] is None:
        return str(report["objection"])
    direct = {True: "O_DIRECT", False: "no O_DIRECT: through the page cache", None: "not writable"}
    facts = (
        f"{report['path']}  {report['filesystem']} on {report['device']},"
        f" {format_bytes(report['free_bytes'])} free, {direct[report['takes_direct_io']]}"
        f"{_CACHES.get(report['write_cache'], '')}"
        f"{_LOCAL_LOCKS if report['has_local_locks'] else ''}"
    )
    if report["objection"] is not None:
        return f"{facts}\n      {report['objection']}"
    if report["verdict"] is None:
        return f"{facts}\n      not measured: `tensorstow calibrate {report['path']}`"
    read, write = report["read_bytes_per_second"], report["write_bytes_per_second"]
    rates = f"reads {format_rate(read)}, writes {format_rate(write)}"
    return f"{facts}\n      {rates}. {report['verdict']}"
