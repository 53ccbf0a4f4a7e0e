"""An accelerator's rates: its link each way and both at once, and what it computes at."""

from collections.abc import Callable

import pytest
import torch

from tensorstow.base.profile import identify_machine
from tensorstow.io.pinned import pinned_bytes
from tensorstow.measure import calibration, host_rates
from tensorstow.measure.calibration import measure_link
from tensorstow.measure.host_rates import measure_compute


@pytest.mark.usefixtures("garbage_apart")
def test_the_link_is_measured(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "_LINK_BYTES", 1 << 20)
    pinned: list[int] = []

    def fastest(work: Callable[[], object], seconds: float) -> float:
        pinned.append(pinned_bytes())
        return host_rates.fastest(work, seconds)

    monkeypatch.setattr(calibration, "fastest", fastest)
    before = pinned_bytes()
    found = measure_link(device, seconds=0.03)
    assert all(1e6 < rate < 1e13 for rate in (found.up, found.down, found.both))
    assert pinned == 3 * [before + (2 << 20)]


def test_what_it_computes_at_is_measured(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = 512 if device.type == "simulated" else 4096
    most = 5e12 if device.type == "simulated" else 1e16  # more: the device was not waited for
    monkeypatch.setattr(host_rates, "_PRODUCT_AWAY", (product, product, product))
    found = measure_compute(device, seconds=0.05)
    assert {"float32", "bfloat16", "float16"} == set(found.flops)
    assert found.tensor_bytes > 1e3
    assert all(1e3 < rate < most for rate in found.flops.values())
    assert found.call_seconds > 0


def test_its_updates_are_measured(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "simulated":
        monkeypatch.setattr(calibration, "PARAMETERS", 1 << 12)
    found = calibration.measure_device_updates(device, seconds=0.01)
    assert set(found) == {"float32/fp32", "bfloat16/fp32", "bfloat16/split", "float16/fp32"}
    assert all(1e2 < rate < 1e13 for rate in found.values())


def test_the_machine_is_told_by_its_accelerator(device: torch.device) -> None:
    found = identify_machine()
    assert found["accelerator"]
    assert found["accelerators"] == torch.accelerator.device_count()
    assert device.type in {found["accelerator"], torch.accelerator.current_accelerator().type}  # type: ignore[union-attr]
