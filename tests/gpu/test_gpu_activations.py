"""What forward saves for backward leaves the device: the bits, the memory, the waits."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from training import spin

from models import FeedForward
from tensorstow import offload_activations
from tensorstow.activations.host_blocks import HostBlocks
from tensorstow.activations.offload import ActivationOffload
from tensorstow.io.device_link import open_link

WIDTH, ROWS = 128, 96
BLOCK = ROWS * WIDTH * 4
BLOCKS = 6


def net(device: torch.device, *, recompute: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [FeedForward(WIDTH, recompute=recompute) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks).to(device)


def rows(device: torch.device) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters()]


def to(where: str, model: nn.Module, folder: Path) -> ActivationOffload:
    if where == "host":
        return offload_activations(model, to="host")
    return offload_activations(model, to="disk", dir=folder, ram_budget=8 * BLOCK)


@pytest.mark.parametrize("inner", ["kept", "recomputed"])
@pytest.mark.parametrize("where", ["host", "disk"])
def test_gradients_are_those_without_it(
    where: str, inner: str, device: torch.device, tmp_path: Path
) -> None:
    model, x = net(device, recompute=inner == "recomputed"), rows(device)
    want = gradients(model, x)
    with to(where, model, tmp_path) as offload:
        for _ in range(3):
            assert all(map(torch.equal, gradients(model, x), want))
        moved = offload._pool.nbytes()
        assert moved.bytes_down > 0
        assert moved.disk_bytes == 0
        assert (moved.bytes_written > 0) is (where == "disk")


@pytest.mark.usefixtures("garbage_apart")
def test_the_device_s_memory_is_free_behind_the_copy(device: torch.device, tmp_path: Path) -> None:
    """And a copy that nobody waited for is counted by the next forward or backward."""
    model, x = net(device), rows(device)
    gradients(model, x)
    held = {}
    for where in ("device", "host", "disk"):
        offload = None if where == "device" else to(where, model, tmp_path)
        gc.collect()
        before = torch.accelerator.memory_allocated(device)
        loss = model(x).square().sum()
        torch.accelerator.synchronize(device)
        if offload is not None:
            moved = offload._pool.nbytes()
            assert moved.bytes_up == 0
        held[where] = torch.accelerator.memory_allocated(device) - before
        loss.backward()
        del loss
        if offload is not None:
            offload.close()
    # What is small stays: the norms' means, the last block's sum, which the loss has saved.
    assert held["host"] == held["disk"] <= 0.15 * held["device"]


LATE = 0.5
"""Seconds; longer than the host takes for a forward."""


def keep_busy(device: torch.device) -> None:
    """Give the device work for longer; others may use its machine, and keep the host waiting."""
    spin(device, LATE if device.type == "simulated" else 4 * LATE)


@contextmanager
def late(device: torch.device) -> Iterator[None]:
    """Keep the device from what is given to it inside, until all of that is given."""
    if device.type != "simulated":
        keep_busy(device)
        yield
        return
    import simulated  # noqa: PLC0415  # registers the device

    hold = simulated.hold(60.0)
    yield
    assert hold.release()


@pytest.mark.parametrize("where", ["host", "disk"])
def test_a_write_behind_the_copy_is_told(where: str, device: torch.device, tmp_path: Path) -> None:
    class Exp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(ROWS * WIDTH))

        def forward(self) -> torch.Tensor:
            return self.weight.exp()

    model = Exp().to(device)
    with to(where, model, tmp_path):
        with late(device):  # else the copy may be over before the write, which then harms nothing
            out = model()
            out.detach().zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        torch.accelerator.synchronize(device)
        if device.type == "simulated":
            import simulated  # noqa: PLC0415  # registers the device

            assert simulated.take_hazards()  # nothing orders the write behind the copy


def test_forward_and_backward_to_host_memory_do_not_wait(device: torch.device) -> None:
    if device.type != "simulated":
        pytest.skip("the simulated accelerator alone counts")
    import simulated  # noqa: PLC0415  # registers the device

    counted: ModuleType = simulated
    model, x = net(device), rows(device)
    with offload_activations(model, to="host"):
        gradients(model, x)  # takes the blocks of pinned memory
        model.zero_grad(set_to_none=False)
        counted.take_counts()
        loss = model(x).square().sum()
        forward = counted.take_counts()
        torch.accelerator.synchronize(device)  # else what is still there is not copied back
        counted.take_counts()
        loss.backward()
        backward = counted.take_counts()
    assert forward["host_waits"] == backward["host_waits"] == 0
    assert forward["bytes_down"] == backward["bytes_up"] > 0


# --- a link that is behind ---


def test_a_forward_that_is_dropped_while_its_copies_are_late(device: torch.device) -> None:
    model, x = net(device), rows(device)
    want = gradients(model, x)
    with offload_activations(model, to="host"):
        keep_busy(device)
        loss = model(x).square().sum()
        del loss
        assert all(map(torch.equal, gradients(model, x), want))


def test_memory_that_late_copies_use_outlives_the_offload(device: torch.device) -> None:
    model, x = net(device), rows(device)
    gradients(model, x)  # the first calls take long
    offload = offload_activations(model, to="host")
    loss = model(x).square().sum()
    torch.accelerator.synchronize(device)
    keep_busy(device)
    loss.backward()
    uploads = list(offload._pool._blocks._uploads._copies)
    ready = uploads[-1][1]
    memory = [block.tensor(0, block.nbytes, torch.uint8) for (_, block), _ in uploads]
    assert not ready.query()
    offload.close()
    del loss, offload, uploads
    gc.collect()
    assert ready.query()  # blocks go when no copy uses them
    del memory


def test_a_tensor_that_a_late_copy_reads_outlives_the_offload(device: torch.device) -> None:
    model, x = net(device), rows(device)
    gradients(model, x)  # the first calls take long
    offload = offload_activations(model, to="host")
    keep_busy(device)
    loss = model(x).square().sum()
    copied = offload._pool._copying[-1].copied
    assert copied is not None
    assert not copied.query()
    del loss
    offload.close()
    assert copied.query()


def test_idle_host_memory_of_changing_shapes_is_bounded(device: torch.device) -> None:
    model = net(device)
    moved, most = 0, 0
    with offload_activations(model, to="host") as offload:
        for turn in range(6):
            gradients(model, torch.randn(ROWS + 32 * turn, WIDTH, device=device))
            torch.accelerator.synchronize(device)
            found = offload._pool.nbytes()
            most = max(most, found.bytes_down - moved)
            moved = found.bytes_down
            assert found.host_bytes <= 2 * most
    assert most > ROWS * WIDTH * 4 * BLOCKS


@pytest.mark.parametrize("budget", [4, 40])
def test_a_backward_whose_copies_are_late(
    budget: int, device: torch.device, tmp_path: Path
) -> None:
    """The host reads from disk while the device still copies what was read before."""
    model, x = net(device), rows(device)
    want = gradients(model, x)
    with offload_activations(model, to="disk", dir=tmp_path, ram_budget=budget * BLOCK) as offload:
        for _ in range(2):
            model.zero_grad()
            loss = model(x).square().sum()
            torch.accelerator.synchronize(device)
            keep_busy(device)
            loss.backward()
            assert all(map(torch.equal, (p.grad for p in model.parameters()), want))
        assert offload._pool.nbytes().bytes_read > 0
        assert offload._pool.nbytes().most_host_bytes <= (budget + 2 * 4) * BLOCK


def test_a_block_that_is_still_copied_up_is_given_to_no_read(device: torch.device) -> None:
    blocks, link = HostBlocks(1 << 20), open_link(device)
    block = blocks.take(BLOCK, device, link)
    target = torch.empty(BLOCK, dtype=torch.uint8, device=device)
    keep_busy(device)
    ready = link.h2d([(target, block.tensor(0, BLOCK, torch.uint8))], [link.record_event()])
    blocks.give_back(block, device, ready)
    blocks.settle()
    assert blocks.take(BLOCK, device, link) is not block
    ready.synchronize()
    blocks.settle()
    assert blocks.take(BLOCK, device, link) is block


def test_forward_to_disk_does_not_wait_for_the_link_while_there_is_room(
    device: torch.device, tmp_path: Path
) -> None:
    if device.type != "simulated":
        pytest.skip("the simulated accelerator alone counts")
    import simulated  # noqa: PLC0415  # registers the device

    model, x = net(device), rows(device)
    saved = BLOCKS * 10 * BLOCK  # its input, the norm's output, two of four times the width
    with offload_activations(model, to="disk", dir=tmp_path, ram_budget=saved * 3 // 2) as offload:
        keep_busy(device)
        simulated.take_counts()
        loss = model(x).square().sum()
        assert simulated.take_counts()["host_waits"] == 0
        assert offload._pool.nbytes().bytes_written == 0
        loss.backward()
