"""The simulated accelerator itself: what is wrong on a device is wrong on it, and is found."""

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

COUNT = 1 << 16


@pytest.fixture
def simulated(device: torch.device) -> Iterator[ModuleType]:
    """Return the package; nothing is out of order when a test begins."""
    if device.type != "simulated":
        pytest.skip("about the simulated accelerator alone")
    import simulated  # noqa: PLC0415  # registers the device

    yield simulated
    simulated.take_hazards()  # which tests here make
    simulated.set_delays(1e-3, 5e9, 0)
    simulated.set_compute(0)
    simulated.set_memory_limit(4 << 30)
    simulated.set_pinned_limit(1 << 62)


def test_work_of_two_streams_that_nothing_orders(
    simulated: ModuleType, device: torch.device
) -> None:
    first = torch.ones(COUNT, device=device)
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        second = first * 2
    third = second + 1
    assert any("nothing orders them" in text for text in simulated.take_hazards())
    torch.accelerator.current_stream().wait_stream(side)
    fourth = second + 1
    assert simulated.take_hazards() == []
    torch.accelerator.synchronize()
    assert torch.equal(fourth.cpu(), torch.full((COUNT,), 3.0))
    del second, third


def test_memory_that_is_freed_while_another_stream_uses_it(
    simulated: ModuleType, device: torch.device
) -> None:
    for is_recorded in (True, False):
        away = torch.zeros(COUNT, device=device)
        side = torch.Stream(device)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            simulated.busy(0.02)
            away.add_(1)
        if is_recorded:
            away.record_stream(side)
        del away
        after = torch.empty(1, device=device)  # its stream goes on
        found = simulated.take_hazards()
        assert is_recorded != any("without record_stream" in text for text in found)
        torch.accelerator.synchronize()
        del after


def test_memory_that_is_freed_before_its_stream_waits_for_who_uses_it(
    simulated: ModuleType, device: torch.device
) -> None:
    """As FSDP2 does: CUDA too gives it away no sooner than in that stream's next work."""
    away = torch.zeros(COUNT, device=device)
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        simulated.busy(0.02)
        more = away + 1
    del away
    torch.accelerator.current_stream().wait_stream(side)
    after = torch.empty(COUNT, device=device)
    assert simulated.take_hazards() == []
    assert torch.equal(more.cpu(), torch.ones(COUNT))
    del after


def test_freed_memory_is_poison(simulated: ModuleType, device: torch.device) -> None:
    del simulated
    away = torch.ones(COUNT, device=device)
    address = away.data_ptr()
    del away
    again = torch.empty(COUNT, device=device)
    assert again.data_ptr() == address
    assert again.isnan().all()


def test_the_host_is_stopped_where_it_reads_the_device_s_memory(
    simulated: ModuleType, device: torch.device
) -> None:
    del simulated
    away = torch.ones(16, device=device)
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(away.data_ptr(), 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_a_forked_process_has_no_device(simulated: ModuleType, device: torch.device) -> None:
    del simulated
    child = os.fork()
    if child == 0:
        try:
            torch.ones(3, device=device)
        except RuntimeError:
            os._exit(3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


@pytest.mark.usefixtures("garbage_apart")
def test_an_allocation_past_the_limit(simulated: ModuleType, device: torch.device) -> None:
    before = torch.accelerator.memory_allocated()
    simulated.set_memory_limit(before + (8 << 20))
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(16 << 20, dtype=torch.uint8, device=device)
    held = torch.empty(4 << 20, dtype=torch.uint8, device=device)
    assert torch.accelerator.memory_allocated() == before + held.nbytes
    del held
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() >= before + (4 << 20)


def test_pinned_copies_are_behind_and_pageable_ones_are_not(
    simulated: ModuleType, device: torch.device
) -> None:
    simulated.set_delays(0.05, 5e9, 0)
    away = torch.zeros(COUNT, device=device)
    torch.accelerator.synchronize()
    simulated.take_counts()
    pinned = torch.ones(COUNT, pin_memory=True)
    away.copy_(pinned, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert simulated.take_counts() == {
        "bytes_down": 0, "bytes_up": pinned.nbytes, "host_waits": 0,
    }  # fmt: skip
    event.synchronize()
    assert event.query()
    pageable = torch.zeros(COUNT)
    pageable.copy_(away, non_blocking=True)
    assert torch.equal(pageable, pinned)
    counts = simulated.take_counts()
    assert counts["bytes_down"] == pageable.nbytes
    assert counts["host_waits"] > 0


def test_a_source_that_changes_under_way_is_seen(
    simulated: ModuleType, device: torch.device
) -> None:
    simulated.set_delays(0, 4 * COUNT / 0.5, 0)  # the rate is not drawn: half a second
    pinned = torch.ones(COUNT, pin_memory=True)
    away = torch.empty(COUNT, device=device)
    away.copy_(pinned, non_blocking=True)
    simulated.busy(0)
    time.sleep(0.01)
    pinned.fill_(2)
    torch.accelerator.synchronize()
    assert any("source changed" in text for text in simulated.take_hazards())


@pytest.mark.usefixtures("garbage_apart")
def test_host_memory_is_registered_to_the_byte(simulated: ModuleType, device: torch.device) -> None:
    runtime = torch.get_device_module(device).cudart()
    host = torch.ones(COUNT)
    before = simulated.registered_bytes()
    assert runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 1) == 0
    assert runtime.cudaHostRegister(host.data_ptr(), 1, 1) == 712
    assert simulated.registered_bytes() == before + host.nbytes
    assert host.is_pinned()
    simulated.set_delays(0, 4 * COUNT / 0.5, 0)
    away = host.to(device, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert not event.query()
    runtime.cudaHostUnregister(host.data_ptr())
    assert any("unregistered while a copy" in text for text in simulated.take_hazards())
    event.synchronize()
    assert torch.equal(away.cpu(), host)
    assert not host.is_pinned()
    assert runtime.cudaHostUnregister(host.data_ptr()) == 713
    simulated.set_pinned_limit(before + 10)
    assert runtime.cudaHostRegister(host.data_ptr(), 11, 1) == 2


def test_random_numbers_are_those_of_the_seed(simulated: ModuleType, device: torch.device) -> None:
    del simulated
    torch.manual_seed(3)
    first = torch.randn(5, device=device)
    torch.manual_seed(3)
    assert torch.equal(first, torch.randn(5, device=device))
    layer = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).to(device)
    x = torch.ones(4, 8, device=device, requires_grad=True)

    def gradient(*, again: bool) -> torch.Tensor:
        torch.manual_seed(5)
        y = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
        (made,) = torch.autograd.grad(y.sum(), x)
        return made

    assert torch.equal(gradient(again=True), gradient(again=False))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_blocks_may_be_compiled(simulated: ModuleType, device: torch.device, backend: str) -> None:
    del simulated
    layer = nn.Linear(8, 8).to(device)
    x = torch.ones(4, 8, device=device)
    assert torch.equal(torch.compile(layer, backend=backend)(x), layer(x))


def test_autocast_casts(simulated: ModuleType, device: torch.device) -> None:
    del simulated
    layer = nn.Linear(8, 8).to(device)
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = layer(x)
        sums = y.sum(), y.softmax(-1), torch.cat([y, x])
    short = nn.functional.linear(x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, short)
    assert all(made.dtype == torch.float32 for made in sums)
    y.float().sum().backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32


def test_tensors_of_two_devices_do_not_mix(simulated: ModuleType, device: torch.device) -> None:
    del simulated
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=device) + torch.ones(3)


def spans_of(log: list[tuple[int, str, float, float, int]], name: str) -> list[tuple[float, float]]:
    return sorted((start, stop) for _, what, start, stop, _ in log if what == name)


def test_copies_of_one_direction_share_the_link(
    simulated: ModuleType, device: torch.device
) -> None:
    nbytes, rate = 1 << 16, 1e6  # 65 ms a copy: longer than a busy machine delays its submission
    simulated.set_delays(0, rate, 0)
    away = torch.zeros(4, nbytes, dtype=torch.uint8, device=device)
    here = [torch.zeros(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(4)]
    torch.accelerator.synchronize()
    simulated.start_trace()
    for i in range(4):
        with torch.Stream(device):
            if i % 2:
                here[i].copy_(away[i], non_blocking=True)
            else:
                away[i].copy_(here[i], non_blocking=True)
    torch.accelerator.synchronize()
    log = simulated.take_trace()
    for name in ("copy down", "copy up"):
        first, second = spans_of(log, name)
        assert second[0] >= first[1]
        for start, stop in (first, second):
            assert stop - start == pytest.approx(nbytes / rate)
    assert spans_of(log, "copy down")[0][0] < spans_of(log, "copy up")[0][1]  # both ways at once


def test_products_of_matrices_take_their_time(simulated: ModuleType, device: torch.device) -> None:
    a, b = torch.ones(8, 4, device=device), torch.ones(4, 6, device=device)
    torch.accelerator.synchronize()
    simulated.set_compute(1e-5)
    simulated.start_trace()
    torch.addmm(torch.ones(6, device=device), a, b)
    c = a @ b
    c += 1
    torch.accelerator.synchronize()
    log = simulated.take_trace()
    (first,), (second,) = spans_of(log, "aten::addmm"), spans_of(log, "aten::mm")
    assert {name for _, name, *_ in log} == {"aten::addmm", "aten::mm", "host waits"}
    for start, stop in (first, second):
        assert stop - start == pytest.approx(2 * 8 * 4 * 6 * 1e-5)
    assert second[0] == pytest.approx(first[1])  # the machine's own work does not add up
    assert torch.equal(c.cpu(), torch.full((8, 6), 5.0))
