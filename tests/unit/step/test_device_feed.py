"""What crosses the link, when, and through how much memory. Bits are those of tests/gpu."""

import gc
import weakref
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models import Vectors
from parity.beside import engine_of
from remote import LateLink, make_remote
from stepped import CHUNK, SIZES, make, make_away
from tensorstow import Adam, AdamW, PipelinePolicy
from tensorstow.base.errors import DTypeError, OptionError, PoisonedError
from tensorstow.colossalai import CPUAdam
from tensorstow.optim.stowed_adam import StowedAdam
from tensorstow.states import memory
from tensorstow.states.memory import StagingPlan, plan_staging
from tensorstow.states.native_pipeline import can_update
from tensorstow.step import validation
from tensorstow.step.device_feed import DeviceFeed
from tensorstow.step.link_feed import LinkGradient

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OVERLAPS = ("none", "forward", "backward")


def train(net: Vectors, optimizer: StowedAdam, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        torch.autograd.backward(net())
        optimizer.step()
    optimizer.wait()


def device_feed_of(optimizer: StowedAdam) -> DeviceFeed:
    device_feed = next(iter(optimizer._params().update_router.device_feeds), None)
    assert device_feed is not None
    return device_feed


def link_of(optimizer: StowedAdam) -> LateLink:
    link = device_feed_of(optimizer).link
    assert isinstance(link, LateLink)
    return link


def test_staging_is_a_slot_per_chunk_up_to_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_staging([]) == StagingPlan(0, 0)
    assert plan_staging([1000]) == StagingPlan(1, 4096)
    assert plan_staging([1 << 19] * 1000) == StagingPlan(32, 2 << 20)
    assert plan_staging([1 << 19] * 1000).nbytes == memory.DEFAULT_STAGING_BYTES
    assert plan_staging([1 << 25] * 9) == StagingPlan(2, 128 << 20)  # never fewer than two
    monkeypatch.setattr(memory, "DEFAULT_STAGING_BYTES", 3 * 4096)
    assert plan_staging([1000, 1, 1000, 1000]).offset(2, 3) == 2 * 4096 + 12


@pytest.mark.parametrize("states", ["ram", "disk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_and_bytes_are_the_formula(
    dtype: str, states: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(monkeypatch, DTYPES[dtype], states=states)
    width = DTYPES[dtype].itemsize
    host_weights = sum(-(-n * width // 128) * 128 for n in SIZES)
    elements = sum(-(-n // 32) * 32 for n in SIZES)
    chunks = -(-elements // CHUNK)
    held = optimizer._memory()
    assert (held.host_weight_bytes, held.staging_bytes) == (host_weights, chunks * 4 * CHUNK)
    assert held.host_bytes == held.ram_bytes + held.ring_bytes + host_weights + held.staging_bytes
    train(net, optimizer)
    begun = optimizer._traffic()
    assert begun.bytes_down == 2 * sum(SIZES) * width  # the first time, the weights too
    train(net, optimizer, 3)
    moved = optimizer._traffic()
    assert moved.bytes_down - begun.bytes_down == 3 * sum(SIZES) * width
    assert moved.bytes_up == 4 * sum(SIZES) * width


def test_fp32_weights_with_bf16_gradients_move_half_as_much_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net, optimizer = make_away(monkeypatch, grad_dtype=torch.bfloat16)
    train(net, optimizer)
    before = optimizer._traffic()
    train(net, optimizer)
    after = optimizer._traffic()
    assert after.bytes_down - before.bytes_down == 2 * sum(SIZES)
    assert after.bytes_up - before.bytes_up == 4 * sum(SIZES)


class Computed:
    """The event of a gradient."""

    def __init__(self, *, over: bool) -> None:
        self.over = over

    def query(self) -> bool:
        return self.over


@pytest.mark.parametrize(
    ("computed", "order"), [(0, [9, 8, 7, 6]), (2, [8, 9, 7, 6]), (4, [6, 7, 8, 9])]
)
def test_the_newest_that_is_computed_goes_first(computed: int, order: list[int]) -> None:
    """Copies wait for each other: one that is to be computed yet would hold up all others."""
    feed: Any = DeviceFeed.__new__(DeviceFeed)
    feed.newest_first = True
    feed._ready = deque([9, 8, 7, 6])
    feed._chunks = {number: SimpleNamespace(owners=[number]) for number in feed._ready}
    feed._gradients = {
        number: LinkGradient(torch.ones(1), Computed(over=place < computed), 1)  # type: ignore[arg-type]  # an event
        for place, number in enumerate(feed._ready)
    }
    assert [feed._next_ready() for _ in range(4)] == order


def test_new_weights_go_up_as_they_are_updated_in_whatever_order() -> None:
    feed: Any = DeviceFeed.__new__(DeviceFeed)
    flights = [SimpleNamespace(chunk=SimpleNamespace(number=n)) for n in range(4)]
    feed._pipeline = SimpleNamespace(is_updated=lambda number: number in {1, 3})
    for newest_first, gone in ((True, [1, 3]), (False, [])):
        feed.newest_first, feed._updating = newest_first, deque(flights)
        assert [f.chunk.number for f in feed._take_updated()] == gone
        assert len(feed._updating) == 4 - len(gone)


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_two_slots_are_enough(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "DEFAULT_STAGING_BYTES", 1)
    want, net = Vectors(SIZES), Vectors(SIZES)
    train(want, make(want), 4)
    make_remote(monkeypatch)
    optimizer = make(net, overlap=overlap)
    assert optimizer._memory().staging_bytes == 2 * 4 * CHUNK
    train(net, optimizer, 4)
    assert all(map(torch.equal, net.parameters(), want.parameters()))


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_gradients_on_the_device_are_let_go(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, overlap=overlap)
    train(net, optimizer, 2)
    assert not any(device_feed_of(optimizer).needs(n) for n in range(len(SIZES)))
    optimizer._params().update_router.step_path.wait()  # returns at once between steps


def test_beside_backward_gradients_leave_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, overlap="backward")
    train(net, optimizer)
    before = link_of(optimizer).copies_down
    optimizer.zero_grad()
    torch.autograd.backward(net())
    assert link_of(optimizer).copies_down > before  # and step() was not called yet
    optimizer.step()


def test_beside_forward_step_does_not_wait_for_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "DEFAULT_STAGING_BYTES", 1)
    net, optimizer = make_away(monkeypatch, overlap="forward")
    train(net, optimizer)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer.zero_grad()
    torch.autograd.backward(net())
    optimizer.step()
    with torch._C.DisableTorchFunctionSubclass():  # what is there now
        assert any(map(torch.equal, net.parameters(), before))
    net()  # waits
    assert not any(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_others_wrote_is_what_is_updated(
    dtype: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meddle(net: Vectors, optimizer: StowedAdam) -> None:
        train(net, optimizer, 2)
        with torch.no_grad():
            net.parts[0].mul_(1.5)
        net.parts[4].data = net.parts[4].data.flip(0).clone()
        train(net, optimizer, 2)

    want, net = Vectors(SIZES, DTYPES[dtype]), Vectors(SIZES, DTYPES[dtype])
    meddle(want, make(want))
    make_remote(monkeypatch)
    meddle(net, make(net, overlap=overlap))
    assert all(map(torch.equal, net.parameters(), want.parameters()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_commit_has_what_others_wrote(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(monkeypatch, DTYPES[dtype], dir=tmp_path, commit_every=None)
    train(net, optimizer, 2)
    with torch.no_grad():
        net.parts[2].fill_(0.25)
    optimizer.commit()
    optimizer.close()
    other = Vectors(SIZES, DTYPES[dtype], seed=1)
    again = make(other, dir=tmp_path, commit_every=None)
    assert again.resume() == 2
    assert all(map(torch.equal, other.parameters(), net.parameters()))
    train(other, again)
    assert other.parts[2].ne(0.25).any()
    again.close()


def test_states_say_what_others_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, torch.bfloat16, state_format="split")
    train(net, optimizer, 2)
    with torch.no_grad():
        net.parts[3].fill_(7)
    assert optimizer.state_dict()["state"][3]["master"].item() == 7


@pytest.mark.parametrize("commit_every", [1, 2])
def test_beside_forward_a_commit_is_never_waited_for_in_vain(
    commit_every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(
        monkeypatch, dir=tmp_path, overlap="forward", commit_every=commit_every
    )
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(net())
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_optimizer_may_go_in_the_middle_of_a_step(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, optimizer = make_away(monkeypatch, overlap=overlap)
    train(net, optimizer)
    optimizer.zero_grad()
    torch.autograd.backward(net())
    if overlap != "backward":
        optimizer.step()
    watcher = weakref.ref(optimizer._params().store)
    for parameter in net.parameters():
        parameter.grad = None
    del optimizer
    gc.collect()
    assert watcher() is None


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_what_fails_on_the_link_ends_the_run(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, overlap=overlap)
    train(net, optimizer)

    def broken(*_: object) -> None:
        message = "CUDA error: unspecified launch failure"
        raise RuntimeError(message)

    monkeypatch.setattr(link_of(optimizer), "h2d", broken)
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        train(net, optimizer)
    monkeypatch.undo()
    with pytest.raises(PoisonedError, match="unspecified launch failure"):
        optimizer.state_dict()
    optimizer.close()


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_a_disk_that_fails_is_told_as_ever(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net, optimizer = make_away(monkeypatch, overlap=overlap)
    train(net, optimizer)
    optimizer.synchronize()
    engine = engine_of(optimizer)
    engine.inject_fault("read", times=-1, error=5)
    with pytest.raises(OSError, match="read of"):
        train(net, optimizer)
    engine.clear_faults()
    with pytest.raises(PoisonedError):
        train(net, optimizer)
    optimizer.close()


def test_a_group_on_the_device_joins_one_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def both(first: Vectors, second: Vectors) -> None:
        optimizer = make(first)
        train(first, optimizer, 2)
        optimizer.add_param_group({"params": list(second.parameters()), "lr": 0.02})
        optimizer.zero_grad()
        for _ in range(2):
            torch.autograd.backward(first() + second())
            optimizer.step()
            optimizer.zero_grad()

    want, got = (Vectors(SIZES), Vectors(SIZES, seed=1)), (Vectors(SIZES), Vectors(SIZES, seed=1))
    both(*want)
    of_second = {id(p) for p in got[1].parameters()}
    make_remote(monkeypatch, lambda p: id(p) in of_second)
    both(*got)
    for a, b in zip(want, got, strict=True):
        assert all(map(torch.equal, a.parameters(), b.parameters()))


def test_frozen_for_a_while_and_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def freeze(net: Vectors, optimizer: StowedAdam) -> None:
        for step in range(5):
            net.parts[4].requires_grad_(step not in {1, 2})
            optimizer.zero_grad()
            torch.autograd.backward(net())
            if step == 3:
                net.parts[0].grad = None
            optimizer.step()
        optimizer.wait()

    want, net = Vectors(SIZES), Vectors(SIZES)
    freeze(want, make(want))
    make_remote(monkeypatch)
    freeze(net, make(net, overlap="forward"))
    assert all(map(torch.equal, net.parameters(), want.parameters()))


def test_a_model_that_moved_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Vectors(SIZES)
    optimizer = make(net)
    train(net, optimizer)
    make_remote(monkeypatch)
    for p in net.parameters():
        p.data = p.data.clone()
    torch.autograd.backward(net())
    with pytest.raises(OptionError, match=r"Parameter 0 of group 0 .*Move the model first"):
        optimizer.step()


def test_two_accelerators_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    make_remote(monkeypatch)
    first = nn.Parameter(torch.ones(3))
    second = nn.Parameter(torch.ones(3, device="meta"))
    with pytest.raises(OptionError, match="cpu and meta"):
        Adam([first, second])


def test_cpu_adam_is_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    make_remote(monkeypatch)
    with pytest.raises(DTypeError, match="CPUAdam is for parameters in host memory"):
        CPUAdam([nn.Parameter(torch.ones(3))])


def test_gradient_and_parameter_are_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    make_remote(monkeypatch)
    parameter = nn.Parameter(torch.ones(3))
    wrong = torch.ones(3, device="meta")  # torch itself would not let it through
    assert not can_update(parameter, wrong)
    with pytest.raises(DTypeError, match="is on meta and the parameter on cpu"):
        validation.check_gradient(parameter, wrong, "Parameter 0 of group 0")


class Branches(nn.Module):
    """Blocks in turn on the device and on the host, small enough to share chunks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

    def forward(self) -> torch.Tensor:
        x = torch.ones(2, 8)
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("chunk", [32, 64, CHUNK], ids=lambda n: f"chunks of {n}")
@pytest.mark.parametrize("first", [0, 1], ids=["host first", "device first"])
@pytest.mark.parametrize("states", ["ram", "disk"])
def test_a_block_on_the_host_waits_for_chunks_that_the_device_has_a_part_in(
    monkeypatch: pytest.MonkeyPatch, states: str, first: int, chunk: int
) -> None:
    def run(net: Branches) -> None:
        policy = PipelinePolicy(chunk_elements=chunk, nan_until_published=True)
        given = {"states": states, "policy": policy}
        optimizer = AdamW(net.parameters(), lr=0.01, module=net, overlap="forward", **given)
        for _ in range(4):
            torch.autograd.backward(net())
            optimizer.step()
            optimizer.zero_grad()
        optimizer.wait()
        optimizer.close()

    want, net = Branches(), Branches()
    run(want)
    host = {id(p) for block in net.blocks[first::2] for p in block.parameters()}
    make_remote(monkeypatch, lambda p: id(p) not in host)
    run(net)
    assert all(map(torch.equal, net.parameters(), want.parameters()))
