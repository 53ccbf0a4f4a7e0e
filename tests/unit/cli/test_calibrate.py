"""`tensorstow calibrate`: what it prints and keeps, and what Ctrl-C leaves."""

from pathlib import Path

import pytest

from command_line import CommandLine
from tensorstow.base.profile import (
    ComputeRates,
    DirectoryRates,
    LinkRates,
    Profile,
    cached_profile_path,
    identify_machine,
    read_profile,
)
from tensorstow.cli import calibrate
from tensorstow.cli.main import main

RATES = DirectoryRates(6e9, 5e9, 4e9, 1 << 20, 32)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def measured(directories: list[Path], tell: object) -> Profile:
    del tell
    return Profile(
        machine=identify_machine(),
        memory_read=20e9,
        memory_write=10e9,
        memory_copy=15e9,
        checksums=10e9,
        update={"bfloat16/split": 1e9},
        compute={"cpu": ComputeRates({"float32": 1e11}, 5e9, 1e-5, 1e9)},
        directories={str(path): RATES for path in directories},
        link=LinkRates(24e9, 25e9, 40e9),
    )


def test_what_is_measured_is_printed_and_kept(
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", measured)
    printed = cli("calibrate", "/nvme")
    for part in (
        "read 20.00 GB/s, write 10.00 GB/s",
        "1,000 million bfloat16 parameters/s, states in split",
        "0.1 TFLOP/s in float32",
        "up 24.00 GB/s, down 25.00 GB/s, both ways 40.00 GB/s",
        "/nvme",
        "1.0 MiB, 32 under way",
        "Worth offloading to: the states of 1e9 bf16 parameters take 5 s per step.",
        str(cached_profile_path()),
    ):
        assert part in printed
    assert read_profile() == measured([Path("/nvme")], None)


def test_directories_of_earlier_times_are_kept(
    monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", measured)
    cli("calibrate", "/one")
    out = cli("calibrate", "/two", "--json")
    said = Profile.from_json(out[out.index("{") :])
    assert set(said.directories) == {"/two"}
    kept = read_profile()
    assert kept is not None
    assert set(kept.directories) == {"/one", "/two"}


def test_an_interrupt_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    def interrupt(*_: object) -> Profile:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "calibrate", interrupt)
    error = cli.json("calibrate", tmp_path, status=130)["error"]
    assert error["message"] == "interrupted"
    assert list(tmp_path.iterdir()) == []


def test_a_busy_machine_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "calibrate", measured)
    monkeypatch.setattr(calibrate.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    main(["calibrate", "/one"])
    assert "warning" not in capsys.readouterr().err
    monkeypatch.setattr(calibrate.os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    main(["calibrate", "/one"])
    assert "measure again when the machine is idle" in capsys.readouterr().err


def test_a_directory_in_ram_is_refused(cli: CommandLine) -> None:
    assert "stays in RAM" in cli("calibrate", "/dev/shm", status=2)


def test_doctor_says_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: CommandLine
) -> None:
    assert f"not measured: `tensorstow calibrate {tmp_path}`" in cli(
        "doctor", "--directory", tmp_path
    )
    monkeypatch.setattr(calibrate, "calibrate", measured)
    cli("calibrate", tmp_path)
    assert "reads 6.00 GB/s, writes 5.00 GB/s. Worth offloading to" in cli(
        "doctor", "--directory", tmp_path
    )
