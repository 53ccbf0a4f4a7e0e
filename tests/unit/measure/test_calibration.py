"""All rates of this machine: each is there, and about what it should be."""

from pathlib import Path

import pytest
import torch

from tensorstow.base.profile import DirectoryRates, identify_machine
from tensorstow.measure import calibration
from tensorstow.measure.calibration import calibrate
from tensorstow.measure.host_rates import (
    fastest,
    measure_checksums,
    measure_compute,
    measure_memory,
    measure_updates,
)
from tensorstow.states.update_trial import FAMILIES


def test_updates_of_every_format_are_measured() -> None:
    found = measure_updates(seconds=0.01)
    assert len(found) == len(FAMILIES)
    assert all(1e5 < rate < 1e12 for rate in found.values())
    assert {"float32/fp32", "bfloat16/split"} <= set(found)


def test_memory_and_computing_are_measured() -> None:
    assert all(1e7 < rate < 1e14 for rate in measure_memory(seconds=0.01))
    found = measure_compute(torch.device("cpu"), seconds=0.01)
    assert all(1e7 < rate < 1e16 for rate in found.flops.values())
    assert {"float32", "bfloat16"} == set(found.flops)
    assert 1e6 < found.tensor_bytes < 1e14
    assert 1e-8 < found.call_seconds < 1e-1
    assert 1e5 < found.random_elements < 1e14
    assert 1e7 < measure_checksums(seconds=0.01) < 1e13


def test_the_fastest_of_three_calls_at_least_counts() -> None:
    calls: list[int] = []
    assert 0 <= fastest(lambda: calls.append(1), seconds=0.0) < 1
    assert len(calls) == 4  # and one that warms


def test_a_profile_has_this_machine_and_its_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = DirectoryRates(6e9, 5e9, 4e9, 1 << 20, 32)
    measured: list[Path] = []

    def measure(path: Path) -> DirectoryRates:
        measured.append(path)
        return rates

    monkeypatch.setattr(calibration, "measure_directory", measure)
    told: list[str] = []
    found = calibrate([tmp_path], told.append)
    assert measured == [tmp_path.resolve()]
    assert found.machine == identify_machine()
    assert found.directories == {str(tmp_path.resolve()): rates}
    assert found.link is None
    assert list(found.compute) == ["cpu"]
    assert any(str(tmp_path) in what for what in told)
