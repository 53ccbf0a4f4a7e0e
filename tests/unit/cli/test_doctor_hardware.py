"""What is special about a machine, from files that stand for those of the system."""

from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import CommandLine
from tensorstow.cli import doctor, doctor_hardware
from tensorstow.cli.doctor_hardware import examine_hardware, notes_of


def notes(root: Path, files: dict[str, str]) -> list[str]:
    """Return what is noted of a machine that has ``files``."""
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return list(notes_of(examine_hardware(root)))


NODES = "sys/devices/system/node"


def test_a_usual_machine_has_no_notes(tmp_path: Path) -> None:
    usual = {
        "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        "sys/class/dmi/id/product_name": "ProLiant DL380\n",
        f"{NODES}/has_cpu": "0-1\n",
        f"{NODES}/has_memory": "0-1\n",
    }
    assert notes(tmp_path, usual) == []
    assert notes(tmp_path / "without files", {}) == []


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"proc/device-tree/model": "NVIDIA Jetson AGX Orin\0"}, 'Plan(states="disk")'),
        ({"sys/class/dmi/id/product_name": "NVIDIA_DGX_Spark\n"}, "no memory of its own"),
        (
            {f"{NODES}/has_cpu": "0-1\n", f"{NODES}/has_memory": "0-1,3,5\n"},
            "NUMA node 3,5 is memory without cores",
        ),
        (
            {"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"},
            "raise memory= there",
        ),
    ],
)
def test_each_kind_of_machine_has_a_sentence(
    files: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    (note,) = notes(tmp_path, files)
    assert wanted in note


class Device:
    type = "cuda"
    is_integrated = 1

    def get_device_properties(self) -> "Device":
        return self


def test_a_gpu_may_say_that_it_shares_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    (note,) = notes(tmp_path, {})
    assert "no memory of its own" in note
    device.is_integrated = 0
    assert notes(tmp_path, {}) == []


@pytest.mark.parametrize(("hip", "kind", "build"), [("6.2", "cuda", "ROCm"), (None, "xpu", "XPU")])
def test_builds_that_are_not_tested_are_named(
    hip: str | None, kind: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device()
    device.type, device.is_integrated = kind, 0
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    monkeypatch.setattr(torch.version, "hip", hip)
    (note,) = notes(tmp_path, {})
    assert note.startswith(f"This torch is for {build}, on which our tests have not run")


def test_notes_are_printed(monkeypatch: pytest.MonkeyPatch, cli: CommandLine) -> None:
    special: dict[str, Any] = {**doctor_hardware.examine_hardware(), "is_wsl": True}
    monkeypatch.setattr(doctor, "examine_hardware", lambda: special)
    assert "Note: This is WSL" in cli("doctor")
