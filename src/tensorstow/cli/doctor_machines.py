"""`tensorstow doctor --ranks`: the machines of all ranks of a launcher, their links and drives.

Every rank examines its machine, and rank 0 prints one table. The first rank of each machine sends
to that of the next, in turns, so that links are measured alone.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensorstow.base.errors import OptionError
from tensorstow.base.launch import Launch
from tensorstow.base.machine import machine_id
from tensorstow.base.sizes import format_bytes
from tensorstow.cli.doctor_advice import Action
from tensorstow.cli.doctor_hardware import notes_of
from tensorstow.cli.output import format_rate, make_console, print_json, print_line, print_table
from tensorstow.fsdp.sharding import from_every_rank, join_ranks

_PINGS = 9
_LEAST_BYTES, _MOST_BYTES = 1 << 16, 1 << 28
_LONG_ENOUGH = 0.2
"""Seconds that a transfer takes from which a rate is computed."""
_LONGEST_WAIT = 60
"""Seconds for which a rank waits for another."""


def run_on_ranks(facts: Mapping[str, Any], launch: Launch, *, as_json: bool) -> int:
    """Print, on rank 0, what the ranks of a launcher are; return the exit status of all of them.

    Args:
        facts: What ``doctor.examine`` found on this rank's machine.
        launch: This rank among those that were started.
        as_json: Print one JSON object instead of a table.

    Raises:
        OptionError: No launcher has started other ranks.
        RankError: They do not come within a minute.
    """
    if launch.world == 1:
        message = (
            "--ranks was given, and no launcher has started other ranks. Start the command by"
            " torchrun, or leave --ranks out."
        )
        raise OptionError(message)
    join_ranks(launch, "gloo", timedelta(seconds=_LONGEST_WAIT))
    try:
        report = examine_machines(facts)
        if dist.get_rank() == 0:
            if as_json:
                print_json(report)
            else:
                _print_report(report)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return int(any(d["objection"] for m in report["machines"] for d in m["directories"]))


def examine_machines(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the machines of all ranks, and what to do, as plain values; a collective call."""
    mine = {
        "id": machine_id(),
        "facts": facts,
        "versions": {name: facts["versions"][name] for name in ("tensorstow", "torch")},
        "directories": [report for report in facts["directories"] if report["named_by_user"]],
        "actions": facts["actions"],
        "notes": list(notes_of(facts["hardware"])),
    }
    of_ranks = from_every_rank(mine)
    machines: dict[tuple[str, ...], dict[str, Any]] = {}
    for rank, of_rank in enumerate(of_ranks):
        name = of_rank["id"][0]
        machine = machines.setdefault(tuple(of_rank["id"]), {"host": name, "ranks": [], **of_rank})
        machine["ranks"].append(rank)
        _merge(machine, of_rank)
    listed = list(machines.values())
    links = _measure_links([machine["ranks"][0] for machine in listed])
    for machine, link in zip(listed, links, strict=True):
        machine["link"] = link
    shared = _find_shared([d["path"] for d in of_ranks[0]["directories"] if not d["objection"]])
    actions = [asdict(action) for action in _actions(listed, shared)]
    return {"machines": listed, "shared": shared, "actions": actions}


def _merge(machine: dict[str, Any], of_rank: Mapping[str, Any]) -> None:
    """Add to a machine what one of its ranks alone objects to, as one in a container may."""
    pairs = zip(machine["directories"], of_rank["directories"], strict=False)
    machine["directories"] = [one if one["objection"] else other for one, other in pairs]
    actions = machine["actions"]
    machine["actions"] = actions + [a for a in of_rank["actions"] if a not in actions]


def _measure_links(leaders: Sequence[int]) -> list[dict[str, Any] | None]:
    """Return what each of ``leaders``, a rank of each machine, measured to the next one."""
    if len(leaders) == 1:
        return [None]
    mine = None
    for sender, receiver in zip(leaders, (*leaders[1:], leaders[0]), strict=True):
        if dist.get_rank() == sender:
            mine = _send(receiver)
        elif dist.get_rank() == receiver:
            _answer(sender)
        dist.barrier()
    return [from_every_rank(mine)[leader] for leader in leaders]


def _send(receiver: int) -> dict[str, Any]:
    """Measure the link to ``receiver``, which calls ``_answer``."""
    pings = [_send_bytes(receiver, 1) for _ in range(_PINGS)]
    nbytes, seconds = _LEAST_BYTES, _send_bytes(receiver, _LEAST_BYTES)
    while seconds < _LONG_ENOUGH and nbytes < _MOST_BYTES:
        nbytes *= 2
        seconds = _send_bytes(receiver, nbytes)
    dist.send(torch.zeros(1, dtype=torch.int64), receiver)
    return {
        "to_rank": receiver,
        "bytes_per_second": nbytes / seconds,
        "seconds": statistics.median(pings) / 2,
    }


def _send_bytes(receiver: int, nbytes: int) -> float:
    """Return how long ``nbytes`` take until they are acknowledged."""
    dist.send(torch.tensor([nbytes]), receiver)
    buffer, answer = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
    dist.recv(answer, receiver)
    start = time.perf_counter()
    dist.send(buffer, receiver)
    dist.recv(answer, receiver)
    return time.perf_counter() - start


def _answer(sender: int) -> None:
    """Receive what ``_send`` sends, until it sends no more."""
    size, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.uint8)
    while True:
        dist.recv(size, sender)
        if not (nbytes := int(size)):
            return
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        dist.send(answer, sender)
        dist.recv(buffer, sender)
        dist.send(answer, sender)


def _find_shared(paths: Sequence[str]) -> dict[str, bool]:
    """Return whether all ranks see the same directory at each of rank 0's ``paths``."""
    with ExitStack() as files:
        marks = [
            files.enter_context(tempfile.NamedTemporaryFile(prefix=".tensorstow-", dir=path)).name
            if dist.get_rank() == 0
            else ""
            for path in paths
        ]
        marks = from_every_rank(marks)[0]
        seen = from_every_rank([Path(mark).exists() for mark in marks])
    return {path: all(of_rank[n] for of_rank in seen) for n, path in enumerate(paths)}


def _actions(machines: Sequence[Mapping[str, Any]], shared: Mapping[str, bool]) -> Iterator[Action]:
    """Yield what is not as it should be among the machines, then on each of them."""
    for name in machines[0]["versions"]:
        numbers = {machine["host"]: machine["versions"][name] for machine in machines}
        if len(set(numbers.values())) > 1:
            listed = ", ".join(f"{number} on {host}" for host, number in numbers.items())
            yield Action(f"{name} is {listed}.", "Install the same version on all machines.")
    for path, is_shared in shared.items():
        if not is_shared and len(machines) > 1:
            yield Action(
                f"{path} is another directory on each machine.",
                "Start the machines in the same order each time (torchrun --node-rank). Another"
                " number of ranks needs the directories of all ranks on every machine.",
            )
    hosts: dict[tuple[str, str], list[str]] = {}
    for machine in machines:
        for action in machine["actions"]:
            hosts.setdefault((action["problem"], action["action"]), []).append(machine["host"])
    for (problem, action), names in hosts.items():
        yield Action(problem if len(machines) == 1 else f"{', '.join(names)}: {problem}", action)


def _print_report(report: Mapping[str, Any]) -> None:
    console = make_console()
    machines = report["machines"]
    hosts = {rank: machine["host"] for machine in machines for rank in machine["ranks"]}
    heads = ["host", "ranks", "accelerator", "threads", "network", "directories"]
    rows = [
        [
            machine["host"],
            ", ".join(map(str, machine["ranks"])),
            machine["facts"]["accelerator"] or "none",
            f"{machine['facts']['threads']['update']} for each rank",
            _describe_link(machine["link"], hosts),
            "; ".join(map(_describe_drive, machine["directories"])),
        ]
        for machine in machines
    ]
    print_table(console, heads, rows)
    if len(machines) > 1:
        console.print()
        for path, is_shared in report["shared"].items():
            sharing = "the same on all machines" if is_shared else "another one on each machine"
            print_line(console, f"{path}: {sharing}")
    for note in dict.fromkeys(note for machine in machines for note in machine["notes"]):
        on = ", ".join(machine["host"] for machine in machines if note in machine["notes"])
        print_line(console, f"\nNote on {on}: {note}")
    if not report["actions"]:
        print_line(console, f"\nOK: {_ready(machines)}")
        return
    console.print("\n[bold]what to do[/]")
    for number, action in enumerate(report["actions"], start=1):
        print_line(console, f"  {number}. {action['problem']}\n     {action['action']}")


def _ready(machines: Sequence[object]) -> str:
    return "this machine is ready." if len(machines) == 1 else "these machines are ready."


def _describe_link(link: Mapping[str, Any] | None, hosts: Mapping[int, str]) -> str:
    if link is None:
        return "one machine"
    rate, latency = format_rate(link["bytes_per_second"]), 1e3 * link["seconds"]
    return f"{rate} to {hosts[link['to_rank']]}, {latency:.2g} ms"


def _describe_drive(report: Mapping[str, Any]) -> str:
    if report["objection"] is not None:
        return str(report["objection"])
    rates = "not measured"
    if report["read_bytes_per_second"] is not None:
        read, write = report["read_bytes_per_second"], report["write_bytes_per_second"]
        rates = f"reads {format_rate(read)}, writes {format_rate(write)}"
    free = format_bytes(report["free_bytes"])
    return f"{report['path']}: {report['filesystem']} on {report['device']}, {free} free, {rates}"
