"""`tensorstow doctor` on the ranks of two hosts: one table of machines, links and drives."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from command_line import CommandLine
from hosts import Hosts, end, start_ranks, why_not
from ports import free_port
from tensorstow.cli import doctor_machines
from tensorstow.cli.doctor_machines import _actions, _merge, _print_report

needs_hosts = pytest.mark.skipif(bool(why_not()), reason=f"hosts cannot be made: {why_not()}")
DOCTOR = ("-m", "tensorstow", "doctor", "--ranks")


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with Hosts(tmp_path) as both:
        yield both


@needs_hosts
def test_one_table_has_hosts_links_and_drives(hosts: Hosts, tmp_path: Path) -> None:
    first, second = hosts
    first.slow_down("100mbit")
    shared = tmp_path / "shared"
    shared.mkdir()
    ranks = [first, first, second, second]
    written = end(start_ranks(ranks, *DOCTOR, "--json", first.local, shared), 0, 0, 0, 0)
    report = json.loads(written[0][written[0].index("{") :])
    assert not any("{" in text for text in written[1:])  # rank 0 alone prints
    one, other = report["machines"]
    assert (one["host"], one["ranks"]) == ("host0", [0, 1])
    assert (other["host"], other["ranks"]) == ("host1", [2, 3])
    assert 6e6 < one["link"]["bytes_per_second"] < 14e6  # 12.5 were set
    assert one["link"]["to_rank"] == 2
    assert other["link"]["to_rank"] == 0
    assert other["link"]["bytes_per_second"] > one["link"]["bytes_per_second"]
    assert report["shared"] == {str(first.local): False, str(shared): True}
    assert [d["path"] for d in one["directories"]] == [str(first.local), str(shared)]
    assert list(shared.iterdir()) == []
    (problem,) = [a["problem"] for a in report["actions"] if "another directory" in a["problem"]]
    assert problem == f"{first.local} is another directory on each machine."


@needs_hosts
def test_a_directory_that_one_machine_lacks_is_named_with_it(hosts: Hosts) -> None:
    first, second = hosts
    first.run("mkdir", first.local / "run")
    written, _ = end(start_ranks([first, second], *DOCTOR, first.local / "run"), 1, 1)
    assert f"{first.local}/run: another one on each machine" in written
    assert f"host1: {first.local}/run cannot hold states" in written
    assert "host1: this machine was not measured" in written


@needs_hosts
def test_ranks_of_one_machine_have_no_links(hosts: Hosts) -> None:
    first, _ = hosts
    written, nothing = end(start_ranks([first, first], *DOCTOR, first.local), 0, 0)
    assert "one machine" in written
    assert "another one on each machine" not in written
    assert "host0" not in nothing


def test_ranks_are_met_on_request_alone(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    assert "--ranks was given, and no launcher has started other ranks" in cli(
        "doctor", "--ranks", status=2
    )
    # As in a shell of a container that trains.
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    cli("doctor")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(doctor_machines, "_LONGEST_WAIT", 1)
    assert "join" in cli("doctor", "--ranks", status=2)


def test_other_versions_and_common_advice_are_told_once() -> None:
    advice = {"problem": "no rates", "action": "tensorstow calibrate"}

    def machine(host: str, torch: str) -> dict[str, Any]:
        return {"host": host, "versions": {"torch": torch}, "actions": [advice]}

    actions = list(_actions([machine("a", "2.11"), machine("b", "2.13")], {"/nvme": True}))
    assert [action.problem for action in actions] == [
        "torch is 2.11 on a, 2.13 on b.",
        "a, b: no rates",
    ]
    (alone,) = _actions([machine("a", "2.11")], {"/nvme": True})
    assert alone.problem == "no rates"


def test_a_note_names_the_machines_that_it_is_on(capsys: pytest.CaptureFixture[str]) -> None:
    def machine(host: str, notes: list[str]) -> dict[str, Any]:
        facts = {"accelerator": None, "threads": {"update": 1}}
        place = {"host": host, "ranks": [0], "facts": facts, "link": None}
        return {**place, "directories": [], "notes": notes}

    machines = [machine("a", ["WSL"]), machine("b", ["WSL", "unified"]), machine("c", [])]
    _print_report({"machines": machines, "shared": {}, "actions": []})
    printed = capsys.readouterr().out
    assert "Note on a, b: WSL" in printed
    assert "Note on b: unified" in printed
    assert "OK: these machines are ready." in printed


def test_what_one_rank_of_a_machine_objects_to_is_the_machines() -> None:
    well, bad = {"path": "/nvme", "objection": None}, {"path": "/nvme", "objection": "full"}
    machine: dict[str, Any] = {"directories": [well, bad], "actions": [{"problem": "a"}]}
    _merge(machine, {"directories": [bad, well], "actions": [{"problem": "a"}, {"problem": "b"}]})
    assert machine["directories"] == [bad, bad]
    assert machine["actions"] == [{"problem": "a"}, {"problem": "b"}]
