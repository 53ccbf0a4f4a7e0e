"""Copies stay on the device within what is free there, as measured."""

import logging

import pytest
import torch

from tensorstow.fsdp.device_cache import DeviceCache

CPU = torch.device("cpu")


@pytest.fixture
def peak(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return what torch is to have allocated at most."""
    found = [0]
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda _: found[0])
    return found


def made(limit: int) -> DeviceCache[str]:
    cache: DeviceCache[str] = DeviceCache(CPU, limit)
    for name, nbytes in (("a", 40), ("b", 100), ("c", 30), ("d", 30)):
        cache.add(name, nbytes)
    return cache


def chosen(cache: DeviceCache[str]) -> str:
    return "".join(name for name in "abcd" if name in cache)


def test_the_first_step_keeps_nothing_and_the_second_what_fits(peak: list[int]) -> None:
    cache = made(200)
    assert chosen(cache) == ""
    peak[0] = 120
    cache.measure(0)
    assert chosen(cache) == "ac"


def test_a_step_that_needs_more_keeps_fewer(peak: list[int]) -> None:
    cache = made(200)
    peak[0] = 120
    cache.measure(0)
    peak[0] = 190  # with what stays
    cache.measure(70)
    assert chosen(cache) == "ac"
    peak[0] = 230
    cache.measure(70)
    assert chosen(cache) == "a"
    peak[0] = 900
    cache.measure(40)
    assert chosen(cache) == ""


def test_a_peak_that_somebody_reset_says_nothing(peak: list[int]) -> None:
    cache = made(200)
    peak[0] = 120
    cache.measure(0)
    peak[0] = 5
    cache.measure(70)
    assert chosen(cache) == "ac"


def test_an_assumption_holds_until_it_is_measured(peak: list[int]) -> None:
    cache = made(200)
    cache.assume(0)
    assert chosen(cache) == "abcd"
    peak[0] = 230
    cache.measure(200)  # so everything else takes 30
    assert chosen(cache) == "abc"
    cache = made(200)
    cache.assume(200)
    assert chosen(cache) == ""
    cache.measure(0)
    assert chosen(cache) == ""


def test_each_change_is_logged_once(peak: list[int], caplog: pytest.LogCaptureFixture) -> None:
    cache = made(2 << 20)
    with caplog.at_level(logging.INFO, logger="tensorstow"):
        peak[0] = 1 << 20
        cache.measure(0)
        peak[0] += 1
        cache.measure(0)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("copies of 4 of 4 units stay on the device")
    assert "takes 1.0 MiB of the limit of 2.0 MiB, as measured" in said
