"""Copies stay on the device within what is free there, as measured."""

import logging
import weakref

import pytest
import torch

from tensorstow.fsdp import device_cache
from tensorstow.fsdp.device_cache import DeviceCache

CPU = torch.device("cpu")


class Device:
    """A device on which torch has allocated what a test says."""

    def __init__(self) -> None:
        self.peak = 0

    def step(self, cache: DeviceCache[str], peak: int, held: int = 0) -> None:
        self.peak, _HELD[cache] = peak, held
        cache.measure()


_HELD: "weakref.WeakKeyDictionary[DeviceCache[str], int]" = weakref.WeakKeyDictionary()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device()
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: found.peak)
    monkeypatch.setattr(device_cache, "_CACHES", weakref.WeakSet())
    return found


def made(limit: int) -> DeviceCache[str]:
    cache: DeviceCache[str] = DeviceCache(CPU, limit, lambda: _HELD.get(cache, 0))
    for name, nbytes in (("a", 40), ("b", 100), ("c", 30), ("d", 30)):
        cache.add(name, nbytes)
    return cache


def chosen(cache: DeviceCache[str]) -> str:
    return "".join(name for name in "abcd" if name in cache)


def test_two_steps_keep_nothing_and_the_third_what_fits(device: Device) -> None:
    cache = made(200)
    assert chosen(cache) == ""
    device.step(cache, 50)  # without the states that this step has made
    assert chosen(cache) == ""
    device.step(cache, 120)
    assert chosen(cache) == "ac"


def test_a_step_that_needs_more_keeps_fewer(device: Device) -> None:
    cache = made(200)
    device.step(cache, 120)
    device.step(cache, 120)
    device.step(cache, 190, held=70)
    assert chosen(cache) == "ac"
    device.step(cache, 230, held=70)
    assert chosen(cache) == "a"
    device.step(cache, 900, held=40)
    assert chosen(cache) == ""


def test_a_peak_that_somebody_reset_says_nothing(device: Device) -> None:
    cache = made(200)
    device.step(cache, 120)
    device.step(cache, 120)
    device.step(cache, 5, held=70)
    assert chosen(cache) == "ac"


def test_an_assumption_holds_until_it_is_measured(device: Device) -> None:
    cache = made(200)
    cache.assume(0)
    assert chosen(cache) == "abcd"
    device.step(cache, 230, held=200)
    assert chosen(cache) == "abcd"
    device.step(cache, 230, held=200)  # so everything else takes 30
    assert chosen(cache) == "abc"
    cache = made(200)
    cache.assume(200)
    assert chosen(cache) == ""


def test_two_models_count_each_other_s_copies(device: Device) -> None:
    """Also those that are chosen and not made yet."""
    one, other = made(200), made(200)
    for cache in (one, other, one):
        device.step(cache, 60)
    assert chosen(one) == "ab"
    device.step(other, 60)
    assert chosen(other) == ""
    device.step(other, 230, held=0)  # those of the other are made: 140 of it, and 90
    _HELD[one] = 140
    device.step(other, 231)
    assert chosen(other) == ""


def test_each_change_is_logged_once(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    cache = made(2 << 20)
    with caplog.at_level(logging.INFO, logger="tensorstow"):
        for peak in (1 << 20, 1 << 20, (1 << 20) + 1):
            device.step(cache, peak)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("copies of 4 of 4 units stay on the device")
    assert "takes 1.0 MiB of the limit of 2.0 MiB, as measured" in said
