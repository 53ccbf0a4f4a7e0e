import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command_line import CommandLine
from tensorstow.base.directories import inspect_directory
from tensorstow.base.mounts import write_cache_of
from tensorstow.cli import doctor
from tensorstow.io import engine
from tensorstow.states.kernels import KernelFacts
from tensorstow.step.update_rule import Choice, TorchRule
from topology import pretend_nodes

SHM = Path("/dev/shm")


def test_everything_is_printed(tmp_path: Path, cli: CommandLine) -> None:
    printed = cli("doctor", "--directory", tmp_path)
    for label in ("tensorstow", "accelerator", "CPU kernel", "threads", "I/O backend", "memlock"):
        assert f"\n{label}" in f"\n{printed}"
    assert str(tmp_path) in printed
    assert "O_DIRECT" in printed


def test_json_says_the_same(tmp_path: Path, cli: CommandLine) -> None:
    facts = cli.json("doctor", "--directory", tmp_path)
    assert facts["kernel"]["isa"] == facts["kernel"]["supported"][0]
    assert facts["threads"]["update"] >= 1
    assert set(facts["io"]["probed"]) == set(engine.BACKENDS)
    assert facts["io"]["probed"][facts["io"]["backend"]] is None
    mine = facts["directories"][0]
    assert mine["path"] == str(tmp_path.resolve())
    assert mine["named_by_user"]
    assert mine["objection"] is None
    assert mine["free_bytes"] > 0
    assert mine["takes_direct_io"] in {True, False}


def test_the_rule_that_updates_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def labels() -> dict[str, str]:
        return dict(doctor._lines(doctor.examine([])))

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    assert doctor.examine([])["device_update"] is None
    assert "device updates" not in labels()
    xpu = torch.device("xpu")
    monkeypatch.setattr(doctor, "read_profile", lambda: None)  # it would ask the device's name
    monkeypatch.setattr(doctor, "examine_hardware", dict)  # so would this
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: xpu)
    why = "the fused kernel is compiled for CUDA, and this is xpu"
    assert doctor.examine([])["device_update"] == {
        "rule": "torch's operations",
        "why_not_fused": why,
    }
    assert labels()["device updates"] == f"torch's operations ({why})"
    monkeypatch.setattr(doctor, "rule_on", lambda *_: Choice(NamedRule()))
    assert labels()["device updates"] == "one fused kernel"


class NamedRule(TorchRule):
    name = "one fused kernel"


@pytest.fixture
def sixteen_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have sixteen cores on two nodes."""
    pretend_nodes(monkeypatch, tmp_path, {0: "0-3,8-11", 1: "4-7,12-15"}, 16)


@pytest.mark.usefixtures("sixteen_cores")
def test_nodes_and_what_each_rank_would_take() -> None:
    facts = doctor.examine([], 3)
    assert facts["threads"]["local_ranks"] == 1  # what `threads` above is of
    lines = doctor._lines(facts)
    begin = [label for label, _ in lines].index("NUMA nodes")
    assert lines[begin : begin + 3] == [
        ("NUMA nodes", "0 (cores 0-3,8-11), 1 (cores 4-7,12-15)"),
        ("ranks", "0-1: 4 threads each on node 0 (cores 0-3,8-11), 11 blocks in flight"),
        ("", "2: 5 threads on node 1 (cores 4-7,12-15), 10 blocks in flight"),
    ]


@pytest.mark.usefixtures("sixteen_cores")
def test_json_has_every_rank(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(doctor, "prepare_kernels", lambda: KernelFacts("scalar", ("scalar",), 8))
    numa = cli.json("doctor")["numa"]
    first, last = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
    assert numa == {
        "nodes": [{"number": 0, "cores": first}, {"number": 1, "cores": last}],
        "rank": 1,
        "ranks": [
            {"rank": 0, "threads": 8, "nodes": [0], "cores": first, "io_depth": 16},
            {"rank": 1, "threads": 8, "nodes": [1], "cores": last, "io_depth": 16},
        ],
    }


def test_local_ranks_are_one_or_more(cli: CommandLine) -> None:
    assert "--local-ranks 0" in cli("doctor", "--local-ranks", "0", status=2)


@pytest.mark.skipif(not SHM.is_dir(), reason="no /dev/shm here")
def test_memory_is_refused_with_the_reason(cli: CommandLine) -> None:
    assert "stays in RAM" in cli("doctor", "--directory", SHM, status=1)


def test_a_missing_directory_is_a_finding(tmp_path: Path, cli: CommandLine) -> None:
    assert "does not exist" in cli("doctor", "--directory", tmp_path / "gone", status=1)


def test_why_not_the_better_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(name: str, _directory: Path | None = None) -> str | None:
        return "io_uring is forbidden here (EPERM)" if name == "uring" else None

    monkeypatch.setattr(engine, "probe_backend", probe)
    monkeypatch.setattr(doctor, "probe_backend", probe)
    engine._chosen.clear()
    try:
        facts = doctor.examine([])
    finally:
        engine._chosen.clear()
    line = dict(doctor._lines(facts))["I/O backend"]
    assert (
        line == "threads; probed: uring does not: io_uring is forbidden here (EPERM), threads works"
    )


def test_a_directory_is_named_with_or_without_its_option(tmp_path: Path, cli: CommandLine) -> None:
    for named in ([str(tmp_path)], ["--directory", str(tmp_path)]):
        listed = cli.json("doctor", *named)["directories"]
        assert [d["path"] for d in listed if d["named_by_user"]] == [str(tmp_path)]


def test_directories_are_listed_once(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    facts = doctor.examine([str(tmp_path), str(link)])
    paths = [d["path"] for d in facts["directories"]]
    assert len(paths) == len(set(paths))


@pytest.mark.parametrize(
    ("text", "found"), [("always [madvise] never\n", "madvise"), ("nothing", None), (None, None)]
)
def test_huge_pages(text: str | None, found: str | None, tmp_path: Path) -> None:
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text)
    assert doctor.huge_pages(setting) == found


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    report = doctor.look_at(tmp_path, named_by_user=True)
    tmp_path.chmod(0o700)
    assert report.takes_direct_io is None
    assert report.objection


def test_a_directory_is_reported_with_its_place_and_its_rates(tmp_path: Path) -> None:
    rates = SimpleNamespace(read=1.0, write=2.0, mixed=3.0, verdict="fast")
    profile: Any = SimpleNamespace(rates_of=lambda _: rates)
    report = doctor.look_at(tmp_path, named_by_user=True, profile=profile)
    facts = inspect_directory(tmp_path)
    assert (report.path, report.named_by_user) == (str(facts.path), True)
    assert report.objection is None
    assert (report.filesystem, report.device) == (facts.mount.filesystem, facts.mount.device)
    assert (report.read_bytes_per_second, report.write_bytes_per_second) == (1.0, 2.0)
    assert (report.mixed_bytes_per_second, report.verdict) == (3.0, "fast")
    mount = facts.mount
    assert (report.has_barriers, report.write_cache) == (mount.has_barriers, write_cache_of(mount))
