import gc
import logging
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from tensorstow.base.errors import BudgetError, OptionError
from tensorstow.io import pinned
from tensorstow.io.pinned import PinnedBlock

CPU, CUDA, OTHER = torch.device("cpu"), torch.device("cuda:0"), torch.device("xpu:0")


class Driver:
    """What torch.cuda.cudart() returns, as far as it is used."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.calls: list[tuple[str, int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1
        self.calls.append(("register", address, nbytes))
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unregister", address, 0))
        return 0


@pytest.fixture(autouse=True)
def _nobody_was_warned() -> Iterator[None]:
    before = set(pinned._warned)
    pinned._warned.clear()
    yield
    pinned._warned.clear()
    pinned._warned.update(before)


def nothing() -> None:
    pass


def test_views_share_the_block_and_begin_at_zero() -> None:
    block = PinnedBlock(1000, CPU, nothing)
    assert block.pinned
    assert block.nbytes == 1000
    halves = block.tensor(512, 100, torch.bfloat16)
    assert halves.dtype == torch.bfloat16
    assert halves.shape == (100,)
    assert not halves.any()
    halves.fill_(1)
    assert block.tensor(512, 50, torch.int32).eq(0x3F803F80).all()
    assert not block.tensor(0, 128, torch.float32).any()


@pytest.mark.usefixtures("garbage_apart")
def test_memory_is_registered_once_and_let_go_when_copies_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(pinned, "_runtime", lambda _: driver)
    order: list[str] = []
    block = PinnedBlock(10_000, CUDA, lambda: order.append(f"settled {len(driver.calls)}"))
    assert block.pinned
    assert block.pinned_bytes == 10_000
    address = block.tensor(0, 1, torch.uint8).data_ptr()
    assert driver.calls == [("register", address, 10_000)]
    del block
    gc.collect()
    assert order == ["settled 1"]
    assert driver.calls[1:] == [("unregister", address, 0)]


@pytest.mark.usefixtures("garbage_apart")
def test_a_driver_that_refuses_is_told_once_and_forgets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver(answer=2)
    asked: list[object] = []

    def innocent(*_: object, device: torch.device) -> SimpleNamespace:
        asked.append(device)
        message = "CUDA error: out of memory"
        raise RuntimeError(message)

    monkeypatch.setattr(pinned, "_runtime", lambda _: driver)
    monkeypatch.setattr(torch, "empty", innocent)
    before = pinned.pinned_bytes()
    with caplog.at_level(logging.WARNING, logger="tensorstow"):
        first = PinnedBlock(2 << 20, CUDA, nothing)
        second = PinnedBlock(2 << 20, CUDA, nothing)
    assert not first.pinned
    assert not second.pinned
    assert asked == [CUDA, CUDA]
    (record,) = caplog.records
    assert record.getMessage().startswith("2.0 MiB of host memory could not be pinned for cuda")
    assert "(the driver's error is 2, the limit of locked memory " in record.getMessage()
    assert "ulimit -l" in record.getMessage()
    assert first.pinned_bytes == 0
    assert pinned.pinned_bytes() == before
    assert first.tensor(0, 4, torch.float32).tolist() == [0, 0, 0, 0]
    del first, second
    assert all(call[0] == "register" for call in driver.calls)


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize("runtime", [Driver(), None])
def test_memory_that_there_is_not_counts_against_no_limit(
    monkeypatch: pytest.MonkeyPatch, runtime: Driver | None
) -> None:
    def none(_: int, **__: object) -> None:
        message = "no room"
        raise BudgetError(message)

    monkeypatch.setattr(pinned, "_runtime", lambda _: runtime)
    monkeypatch.setattr(pinned, "_from_torch", lambda _: None)
    monkeypatch.setattr(pinned, "Arena", none)
    before = pinned.pinned_bytes()
    with pytest.raises(BudgetError, match="no room"):
        PinnedBlock(4096, CUDA, nothing)
    assert pinned.pinned_bytes() == before


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize("raised", [MemoryError, KeyboardInterrupt])
def test_what_pinning_raises_leaves_nothing_counted(
    monkeypatch: pytest.MonkeyPatch, raised: type[BaseException]
) -> None:
    def register(*_: object) -> None:
        raise raised

    monkeypatch.setattr(pinned, "_runtime", lambda _: Driver())
    monkeypatch.setattr(pinned, "register", register)
    before = pinned.pinned_bytes()
    with pytest.raises(raised):
        PinnedBlock(4096, CUDA, nothing)
    assert pinned.pinned_bytes() == before


@pytest.mark.usefixtures("garbage_apart")
def test_no_more_is_pinned_than_the_limit_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = Driver()
    monkeypatch.setattr(pinned, "_runtime", lambda _: driver)
    before = pinned.pinned_bytes()
    monkeypatch.setenv(pinned.LIMIT, f"{before + 3000}B")
    with caplog.at_level(logging.WARNING, logger="tensorstow"):
        first, second = PinnedBlock(3000, CUDA, nothing), PinnedBlock(1, CUDA, nothing)
        assert (first.pinned, second.pinned) == (True, False)
        assert pinned.pinned_bytes() == before + 3000
        del first
        gc.collect()
        assert PinnedBlock(3000, CUDA, nothing).pinned
    (record,) = caplog.records
    assert record.getMessage().startswith("1 B of host memory could not be pinned for cuda (TENS")
    assert f"{pinned.LIMIT} is {before + 3000}" in record.getMessage()
    monkeypatch.setenv(pinned.LIMIT, "12 parsecs")
    with pytest.raises(OptionError, match=f"{pinned.LIMIT}='12 parsecs'"):
        PinnedBlock(1, CUDA, nothing)


def test_nothing_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(answer=1)
    monkeypatch.setattr(pinned, "_runtime", lambda _: driver)
    assert PinnedBlock(0, CUDA, nothing).pinned
    assert driver.calls == []


def test_memory_is_unpinned_where_waiting_for_its_copies_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver()
    monkeypatch.setattr(pinned, "_runtime", lambda _: driver)
    memory = pinned._Memory(torch.zeros(8), CUDA, is_registered=True, owner=os.getpid())

    def fail() -> None:
        message = "the device is lost"
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="the device is lost"):
        pinned._release(fail, memory)
    assert driver.calls == [("unregister", memory.bytes.data_ptr(), 0)]


def test_elsewhere_torch_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []

    def zeros(nbytes: int, **given: object) -> torch.Tensor:
        asked.append(given)
        return torch.full((nbytes,), 7, dtype=torch.uint8)

    monkeypatch.setattr(torch, "zeros", zeros)
    block = PinnedBlock(64, OTHER, nothing)
    assert block.pinned
    assert asked == [{"dtype": torch.uint8, "device": "cpu", "pin_memory": True}]
    assert block.tensor(0, 2, torch.uint8).tolist() == [7, 7]
    assert block.pinned_bytes == 64


def test_where_torch_cannot_pin_memory_is_pageable(caplog: pytest.LogCaptureFixture) -> None:
    if torch.accelerator.is_available():
        pytest.skip("torch can, here")
    with caplog.at_level(logging.WARNING, logger="tensorstow"):
        block = PinnedBlock(64, OTHER, nothing)
    assert not block.pinned
    assert len(caplog.records) == 1
    assert block.tensor(0, 64, torch.uint8).eq(0).all()
