"""What crosses the link, through which memory, beside what; and that nobody stops the device."""

import gc
import time

import pytest
import torch
from benchmarks.accelerator import bounds
from training import SIZES, SMALL, Net, make, spin, train

from tensorstow.io import pinned
from tensorstow.io.device_link import StreamLink, is_remote
from tensorstow.io.pinned import PinnedBlock
from tensorstow.states.memory import plan_staging

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OVERLAPS = ("none", "forward", "backward")


def test_what_is_remote(device: torch.device) -> None:
    assert is_remote(torch.zeros(3, device=device))
    assert not is_remote(torch.zeros(3))


def test_copies_there_and_back(device: torch.device) -> None:
    link = StreamLink(device)
    away = torch.arange(1 << 16, dtype=torch.float32, device=device)
    host, back = torch.zeros(1 << 16), torch.zeros(1 << 16, device=device)
    link.d2h([(host, away)], [link.record_event()]).synchronize()
    assert torch.equal(host, away.cpu())
    link.join(link.h2d([(back, host)], [link.record_event()]))
    assert torch.equal(back, away)
    assert link.bytes_down == link.bytes_up == 4 << 16
    link.synchronize()


def test_memory_is_pinned(device: torch.device) -> None:
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net)
    train(net, optimizer, 0, 1)
    device_feed = next(iter(optimizer._params().update_router.device_feeds), None)
    assert device_feed is not None
    assert device_feed.staging.pinned
    assert device_feed.staging.tensor(0, 16, torch.uint8).is_pinned()
    assert all(m.weight.is_pinned() for m in optimizer._params().all())
    held = optimizer._memory()
    assert held.pinned_bytes == held.host_weight_bytes + held.staging_bytes


def test_torch_pins_where_nothing_registers_memory(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "_runtime", lambda _: None)
    block = PinnedBlock(3000, device, torch.accelerator.synchronize)
    assert block.pinned_bytes == 4096
    assert block.tensor(0, 3000, torch.uint8).is_pinned()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_over_the_link_and_in_memory(dtype: str, overlap: str, device: torch.device) -> None:
    net = Net(DTYPES[dtype]).to(device)
    optimizer = make(net, overlap=overlap)
    width = DTYPES[dtype].itemsize
    elements = sum(-(-n // 32) * 32 for n in SIZES)
    chunks = -(-elements // SMALL.chunk_elements)
    held = optimizer._memory()
    assert held.host_weight_bytes == sum(-(-n * width // 128) * 128 for n in SIZES)
    assert held.staging_bytes == plan_staging([SMALL.chunk_elements] * chunks).nbytes
    train(net, optimizer, 0, 1)
    before = optimizer._traffic()
    train(net, optimizer, 1, 4)
    after = optimizer._traffic()
    assert after.bytes_down - before.bytes_down == 3 * width * sum(SIZES)
    assert after.bytes_up - before.bytes_up == 3 * width * sum(SIZES)


@pytest.mark.usefixtures("garbage_apart")
def test_the_device_holds_no_states(device: torch.device) -> None:
    net = Net(torch.float32).to(device)
    optimizer = make(net, overlap="backward")
    train(net, optimizer, 0, 2)
    optimizer.zero_grad()
    gc.collect()
    held = torch.accelerator.memory_allocated(device)
    train(net, optimizer, 2, 4)
    optimizer.zero_grad()
    gc.collect()
    assert torch.accelerator.memory_allocated(device) == held


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize("states", ["ram", "disk"])
def test_updates_on_the_device_pass_through_three_chunks_of_its_memory(
    states: str, device: torch.device
) -> None:
    net = Net(torch.float32).to(device)
    optimizer = make(net, states=states, update_on="device")
    train(net, optimizer, 0, 2)
    updater = next(iter(optimizer._params().update_router.updaters), None)
    assert updater is not None
    assert all(slot.device == device for slot in updater._slots)
    table = updater._table_room  # where a fused kernel updates: a row for each parameter
    assert 0 <= table <= 1 << 10
    assert optimizer._memory().device_bytes == 3 * (2 * 4 * SMALL.chunk_elements + table)
    for chunk in optimizer._states().chunks:
        where = -1 if chunk.resident else 0
        assert all(s.is_pinned() for s in optimizer._states().streams_at(chunk, where))
    optimizer.zero_grad()
    gc.collect()
    held = torch.accelerator.memory_allocated(device)
    train(net, optimizer, 2, 4)
    optimizer.zero_grad()
    gc.collect()
    assert torch.accelerator.memory_allocated(device) == held


def test_updates_on_the_device_are_there_for_whatever_the_stream_does_next(
    device: torch.device,
) -> None:
    """Each step begins behind work that is still to be done, and nobody waits for it."""
    net, twin = Net(torch.bfloat16).to(device), Net(torch.bfloat16)
    optimizer, reference = make(net, update_on="device"), make(twin)
    seen: list[torch.Tensor] = []
    for step in range(20):
        optimizer.zero_grad()
        spin(device, 0.01)
        torch.autograd.backward(net(step))
        optimizer.step()
        seen.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
    for step, weights in enumerate(seen):
        train(twin, reference, step, step + 1)
        assert torch.equal(
            weights.cpu(), torch.cat([p.detach().view(-1) for p in twin.parameters()])
        )


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_step_waits_for_no_other_stream(overlap: str, device: torch.device) -> None:
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, overlap=overlap)
    train(net, optimizer, 0, 2)
    torch.accelerator.synchronize()
    other = torch.Stream(device=device)
    with other:
        spin(device, 2.0)
    elsewhere = other.record_event()
    train(net, optimizer, 2, 3)
    torch.accelerator.current_stream(device).synchronize()
    assert not elsewhere.query(), "the whole device was waited for"
    other.synchronize()


def test_gradients_come_down_beside_what_the_device_computes(device: torch.device) -> None:
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, overlap="backward")
    train(net, optimizer, 0, 2)
    torch.accelerator.synchronize()
    optimizer.zero_grad()
    torch.autograd.backward(net(2))
    spin(device, 1.0)
    end = torch.accelerator.current_stream(device).record_event()
    device_feed = next(iter(optimizer._params().update_router.device_feeds), None)
    assert device_feed is not None
    deadline = time.monotonic() + 30
    while any(device_feed.needs(n) for n in range(len(SIZES))) and time.monotonic() < deadline:
        device_feed.move_on()
    assert not end.query(), "copies waited for what was computed behind them"
    optimizer.step()


def test_weights_are_there_for_whatever_the_stream_does_next(device: torch.device) -> None:
    """Many steps without a word to the device: a copy that comes late would change a weight."""
    net, twin = Net(torch.bfloat16).to(device), Net(torch.bfloat16)
    optimizer, reference = make(net, overlap="forward"), make(twin)
    seen: list[torch.Tensor] = []
    for step in range(20):
        optimizer.zero_grad()
        torch.autograd.backward(net(step))
        optimizer.step()
        optimizer.wait()
        seen.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
    for step, weights in enumerate(seen):
        train(twin, reference, step, step + 1)
        assert torch.equal(
            weights.cpu(), torch.cat([p.detach().view(-1) for p in twin.parameters()])
        )


def test_the_benchmark_copies_what_is_there(device: torch.device) -> None:
    """What the link's rate is measured with is made by the device, which may be late."""
    link = StreamLink(device)
    nbytes = 1 << 20
    block = PinnedBlock(2 * nbytes, device, link.synchronize)
    spin(device, 0.1)
    rates = bounds._link(link, block)
    for rate in rates.values():
        block.tensor(0, 2 * nbytes, torch.uint8).zero_()
        rate.run()
        is_down = rate is not rates[bounds.UP]
        assert bool(block.tensor(0, nbytes, torch.uint8).eq(int(is_down)).all())
