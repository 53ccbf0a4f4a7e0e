"""Each wait and each lifetime of work that is late: without it, bits or the order are wrong.

Nothing here waits for the device but what is tested: inputs are there before, and the caller's
stream is busy where something must wait for it. Some tests look at the order of work, which the
simulated accelerator alone knows; on others they look at the bits.
"""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from training import Net, make, same_weights, spin, train

from compare import all_equal
from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.base.update_on import IN_STEP
from tensorstow.deepspeed.timer import StepTimer
from tensorstow.fsdp import gradient_offload
from tensorstow.fsdp.fp32_sums import accumulate_in_fp32
from tensorstow.fsdp.h2d_prefetch import DeviceBuffers, H2DPrefetcher
from tensorstow.fsdp.shard_storage import ShardStorage
from tensorstow.fsdp.stowed_parameter import storage_of
from tensorstow.io.device_link import DeviceEvent, Pairs, StreamLink
from tensorstow.io.pinned import PinnedBlock
from tensorstow.step import backward_overlap
from tensorstow.step.gradient_feed import StepFeeds
from tensorstow.step.host_weight import HostWeight, make_host_weights, refresh, upload
from tensorstow.step.segment_update import Update
from tensorstow.step.share_tuner import ShareTuner, SideTiming
from tensorstow.step.update_rule import UpdateRule

COUNT = 1 << 16
LATE = 0.1
OVERLAPS = ("none", "forward", "backward")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture
def link(device: torch.device) -> StreamLink:
    """Return a link to the device, on which nothing is under way."""
    torch.accelerator.synchronize()
    return StreamLink(device)


def pinned(value: float) -> torch.Tensor:
    return torch.full((COUNT,), value, pin_memory=True)


# --- the link ---


def test_a_copy_down_waits_for_what_makes_its_source(link: StreamLink) -> None:
    away, host = torch.ones(COUNT, device=link.device), pinned(0)
    spin(link.device, LATE)
    away.fill_(2)
    link.d2h([(host, away)], [link.record_event()]).synchronize()
    assert host.eq(2).all()


def test_a_copy_up_waits_for_what_reads_its_target(link: StreamLink) -> None:
    away, host = torch.ones(COUNT, device=link.device), pinned(2)
    spin(link.device, LATE)
    before = away.clone()
    link.join(link.h2d([(away, host)], [link.record_event()]))
    after = away.clone()
    assert before.eq(1).all()
    assert after.eq(2).all()


def test_memory_that_is_freed_behind_a_copy_up_is_not_given_to_others(link: StreamLink) -> None:
    away, host = torch.ones(COUNT, device=link.device), pinned(2)
    busy = torch.Stream(link.device)
    with busy:
        spin(link.device, LATE)
    link.h2d([(away, host)], [link.record_event(), busy.record_event()])
    del away
    other = torch.zeros(COUNT, device=link.device)
    link.synchronize()
    assert other.eq(0).all()


@pytest.mark.parametrize("way", ["down", "up", "update", "second link"])
def test_nothing_is_under_way_on_a_settled_link(way: str, link: StreamLink) -> None:
    away, host = torch.ones(COUNT, device=link.device), pinned(2)
    spin(link.device, 5 * LATE)
    mark = link.record_event()
    if way == "update":
        with link.update_stream():
            link.join(mark)
            over = link.record_event()
    elif way == "up":
        over = link.h2d([(away, host)], [mark])
    else:
        used = link.second_link() if way == "second link" else link
        over = used.d2h([(host, away)], [mark])
    assert not mark.query(), "the host waited for a copy that waits for this"
    link.synchronize()
    assert over.query()


def test_copies_run_beside_the_caller_s_stream(link: StreamLink) -> None:
    """On a device that others use too, a copy may take its time: so the caller gets more work."""
    for late in (5 * LATE, 20 * LATE, 80 * LATE):
        away, host, back = torch.ones(COUNT, device=link.device), pinned(2), pinned(0)
        there = link.record_event()
        spin(link.device, late)
        end = link.record_event()
        up = link.h2d([(away, host)], [there])
        link.d2h([(back, away)], [up]).synchronize()
        is_beside = not end.query()
        assert back.eq(2).all()
        if is_beside:
            return
    pytest.fail("the copies were behind what the caller's stream computes")


# --- weights ---


@pytest.fixture
def host_weight(link: StreamLink) -> Iterator[HostWeight]:
    """Return the host weight of a parameter of ones; its block keeps it pinned."""
    weight = nn.Parameter(torch.ones(COUNT, device=link.device))
    block, (made,) = make_host_weights([weight], link)
    yield made
    del block


def test_a_weight_that_is_still_to_be_written_is_fetched_as_it_will_be(
    link: StreamLink, host_weight: HostWeight
) -> None:
    spin(link.device, LATE)
    host_weight.parameter.data.fill_(2)
    refresh([host_weight], link)
    assert host_weight.host.eq(2).all()


def test_a_weight_is_uploaded_behind_its_readers(link: StreamLink, host_weight: HostWeight) -> None:
    host_weight.host.fill_(2)
    spin(link.device, LATE)
    before = host_weight.parameter.detach().clone()
    upload([host_weight], link)
    after = host_weight.parameter.detach().clone()
    assert before.eq(1).all()
    assert after.eq(2).all()


def test_a_weight_is_uploaded_before_whatever_comes_next(
    link: StreamLink, host_weight: HostWeight
) -> None:
    host_weight.host.fill_(2)
    hold_up(link)
    upload([host_weight], link)
    assert host_weight.parameter.detach().clone().eq(2).all()


@pytest.mark.parametrize("update_on", ["host", "device"])
def test_what_is_written_late_between_backward_and_step_is_seen(
    update_on: str, device: torch.device
) -> None:
    want, got = Net(torch.bfloat16), Net(torch.bfloat16).to(device)
    got.bring(range(3))
    for net in (want, got):
        optimizer = make(net, update_on="host" if net is want else update_on)
        for step in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(net(step))
            if net is got:
                spin(device, LATE)
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(0.5)
            optimizer.step()
        optimizer.wait()
    assert same_weights(got, want)


# --- gradients on their way down, weights on their way up ---


def gone_through(net: Net, optimizer: AdamW, device: torch.device) -> list[torch.Tensor]:
    """Take steps without a word to the device; return the weights behind each.

    Gradients are made late, and read late: what comes too early or too late changes a weight.
    """
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        loss = net(step)
        spin(device, LATE / 4)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.wait()
        spin(device, LATE / 4)
        seen.append(torch.cat([p.detach().view(-1) for p in net.parameters()]))
    return seen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("overlap", "update_on"),
    [
        *((o, "host") for o in OVERLAPS),
        *((o, u) for o in ("none", "backward") for u in ("device", "hybrid")),
        ("backward", 0.4),
    ],
)
def test_steps_whose_gradients_are_late(
    overlap: str, update_on: str | float, dtype: str, device: torch.device
) -> None:
    want, got = Net(DTYPES[dtype]), Net(DTYPES[dtype]).to(device)
    got.bring(range(4))
    optimizer, reference = make(got, overlap=overlap, update_on=update_on), make(want)
    seen = gone_through(got, optimizer, device)
    for step, weights in enumerate(seen):
        train(want, reference, step, step + 1)
        whole = torch.cat([p.detach().view(-1) for p in want.parameters()])
        assert torch.equal(weights.cpu(), whole)
    optimizer.close()


# --- gradients of a stowed model ---

WIDTH = 256
LAYERS = 6


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))).bfloat16()


def late_steps(
    model: nn.Module, optimizer: AdamW, device: torch.device, *, micro_batches: int = 1
) -> list[torch.Tensor]:
    """Take steps without a word to the device, whose gradients are late; return the weights."""
    x = torch.linspace(-1, 1, WIDTH, device=device, dtype=torch.bfloat16).expand(4, -1)
    for _ in range(3):
        optimizer.zero_grad()
        for number in range(micro_batches):
            y = model(x * (number + 1)).float().square().sum()
            spin(device, LATE / 2)
            y.backward()
        optimizer.step()
    optimizer.wait()
    local = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    weights = [p.detach().cpu().clone() for p in local]
    optimizer.close()
    return weights


BESIDE = Plan(parameters="device", overlap="backward")
STOWED = {
    "device": Plan(parameters="device"),
    "device-forward": Plan(parameters="device", overlap="forward"),
    "host": Plan(parameters="host"),
    "host-backward": Plan(parameters="host", overlap="backward"),
}


@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("plan", STOWED)
def test_gradients_of_a_stowed_model_that_are_late(
    plan: str, device: torch.device, *, nan: bool
) -> None:
    """Weights that are NaN until they are new are still copied to the device before that."""
    plain = layers().to(device)
    want = late_steps(plain, AdamW(plain.parameters(), lr=1e-2), device)
    policy = PipelinePolicy(nan_until_published=nan and STOWED[plan].overlap != "none")
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2, policy=policy), plan=STOWED[plan])
    assert all_equal(late_steps(model, optimizer, device), want)


SUMMED = {**STOWED, "disk": Plan(parameters="disk"), "device-backward": BESIDE}


@pytest.mark.parametrize("plan", SUMMED)
def test_gradients_of_later_micro_batches_that_are_late(
    plan: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come down in pieces, and the last are short."""
    monkeypatch.setattr(gradient_offload, "PIECE_BYTES", 3 * WIDTH * WIDTH // 2)
    monkeypatch.setattr(gradient_offload, "PIECE_BUFFERS", 3)
    plain = layers().to(device)
    accumulate_in_fp32(plain.parameters())
    want = late_steps(plain, AdamW(plain.parameters(), lr=1e-2), device, micro_batches=3)
    many = SUMMED[plan].but(accumulation_steps=3)
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2), plan=many)
    assert all_equal(late_steps(model, optimizer, device, micro_batches=3), want)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("plan", STOWED)
def test_backward_returns_while_the_device_is_busy(
    plan: str, micro_batches: int, device: torch.device
) -> None:
    many = STOWED[plan].but(accumulation_steps=micro_batches)
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2), plan=many)
    x = torch.ones(4, WIDTH, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            y = model(x).float().square().sum()
            spin(device, 3 * LATE)
            mark = torch.accelerator.current_stream().record_event()
            y.backward()
            is_busy = not mark.query()
        optimizer.step()
    assert is_busy
    optimizer.close()


def test_updates_begin_before_all_weights_have_gone_up(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last weights of backward go up when most gradients are down already."""
    order: list[str] = []

    def watch(kind: type, name: str) -> None:
        do = getattr(kind, name)

        def told(self: object, *given: object) -> None:
            order.append(name)
            do(self, *given)

        monkeypatch.setattr(kind, name, told)

    watch(StepFeeds, "_take")
    watch(DeviceBuffers, "wait_for_copies")
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2), plan=STOWED["host-backward"])
    x = torch.ones(4, WIDTH, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        optimizer.zero_grad()
        y = model(x).float().square().sum()
        spin(device, 5 * LATE)
        y.backward()
        order.clear()
        optimizer.step()
    assert order[: LAYERS + 1] == ["_take"] * LAYERS + ["wait_for_copies"]
    optimizer.close()


@pytest.mark.parametrize("parameters", ["host", "disk"])
def test_backward_waits_for_no_gradient_that_is_on_its_way(
    parameters: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The window is for those that have arrived: a host that waited would leave no work behind."""
    monkeypatch.setattr(backward_overlap, "WINDOW_BYTES", 0)
    plan = Plan(parameters=parameters, overlap="backward")  # type: ignore[arg-type]  # text
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2), plan=plan)
    x = torch.ones(4, WIDTH, device=device, dtype=torch.bfloat16)
    for _ in range(3):
        y = model(x).float().square().sum()
        torch.accelerator.synchronize()
        spin(device, 5 * LATE)
        mark = torch.Event(device)
        mark.record()
        y.backward()
        is_ahead = not mark.query()
        optimizer.step()
        optimizer.zero_grad()
    assert is_ahead  # the first step pins memory, which may wait for the device
    optimizer.close()


@contextmanager
def stepped_beside_backward(device: torch.device) -> Iterator[None]:
    """Run a forward and a backward of host weights, and the step after the block."""
    plan = Plan(parameters="host", overlap="backward")
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2), plan=plan)
    x = torch.ones(4, WIDTH, device=device, dtype=torch.bfloat16)
    model(x).float().square().sum().backward()
    yield
    optimizer.step()
    optimizer.close()


def test_gradients_of_three_units_wait_for_updates_before_backward_does(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer, and updates have none left while the device computes the next unit."""
    held: list[int] = []

    def counted(_: object, numbers: Sequence[int]) -> bool:
        held.append(len(numbers))
        return False

    def arrived(total: gradient_offload.HostSum) -> bool:
        total.synchronize()
        return True

    monkeypatch.setattr(gradient_offload.HostSum, "query", arrived)
    monkeypatch.setattr(StepFeeds, "wait_for_one", counted)
    monkeypatch.setattr(StepFeeds, "needs", lambda *_: True)  # no update is over
    monkeypatch.setattr(backward_overlap, "WINDOW_BYTES", 0)
    with stepped_beside_backward(device):
        assert held == [4, 5, 6]


def test_gradients_on_their_way_take_no_room_of_those_that_wait(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has arrived and waits for its update, five are being copied: nobody waits."""
    asked: list[int] = []
    arrived: list[gradient_offload.HostSum] = []

    def is_first(total: gradient_offload.HostSum) -> bool:
        if not arrived:
            total.synchronize()
            arrived.append(total)
        return total is arrived[0]

    monkeypatch.setattr(gradient_offload.HostSum, "query", is_first)
    monkeypatch.setattr(
        StepFeeds, "wait_for_one", lambda _, numbers: bool(asked.append(len(numbers)))
    )
    monkeypatch.setattr(StepFeeds, "needs", lambda *_: True)  # no update is over
    monkeypatch.setattr(backward_overlap, "WINDOW_BYTES", 0)
    with stepped_beside_backward(device):
        assert asked == []


def test_few_gradients_of_a_stowed_model_are_on_their_way(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward waits for the first of them, and for no other."""
    one = WIDTH * WIDTH * 2
    monkeypatch.setattr(gradient_offload, "MAX_IN_FLIGHT_BYTES", one)
    plain = layers().to(device)
    want = late_steps(plain, AdamW(plain.parameters(), lr=1e-2), device)
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2), plan=Plan(parameters="device"))
    assert all_equal(late_steps(model, optimizer, device), want)


def test_a_step_by_gradients_that_are_in_host_memory_already(device: torch.device) -> None:
    """Its updates wait for the weights that go up of the step before."""

    def twice(model: nn.Module, optimizer: AdamW) -> list[torch.Tensor]:
        seen = []
        model(torch.ones(4, WIDTH, device=device, dtype=torch.bfloat16)).float().sum().backward()
        for _ in range(2):
            feeds = optimizer._params().update_router.device_feeds if optimizer.state else []
            device_feed = feeds[0] if feeds else None
            if device_feed is not None:
                assert isinstance(device_feed.link, StreamLink)
                with device_feed.link._h2d_stream:
                    spin(device, LATE)
            optimizer.step()
            seen.append(torch.cat([p.detach().view(-1) for p in model.parameters()]))
        weights = [s.cpu() for s in seen]
        optimizer.close()
        return weights

    plain = layers().to(device)
    want = twice(plain, AdamW(plain.parameters(), lr=1e-2))
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2), plan=Plan(parameters="device"))
    assert all_equal(twice(model, optimizer), want)


# --- states on their way up and down ---


@pytest.mark.parametrize("states", ["ram", "disk"])
def test_slots_on_the_device_are_made_of_memory_that_is_in_use_still(
    states: str, device: torch.device
) -> None:
    """fp32: nothing else of the first step waits for the caller's stream."""
    want, got = Net(torch.float32), Net(torch.float32).to(device)
    train(want, make(want, states="ram"), 0, 1)
    got.bring(range(1))
    torch.autograd.backward(got(0))
    optimizer = make(got, states=states, update_on="device")
    policy = optimizer._params().offload_policy.policy
    slot = 2 * 4 * (policy.chunk if states == "disk" else policy.linked_chunk)
    used = [torch.ones(slot, dtype=torch.uint8, device=device) for _ in range(3)]
    spin(device, LATE)
    for memory in used:
        memory.fill_(7)
    del memory, used
    optimizer.step()
    assert same_weights(got, want)


def test_backward_goes_on_while_states_go_up(device: torch.device) -> None:
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, states="ram", overlap="backward", update_on="device")
    train(net, optimizer, 0, 2)
    net.bring(range(2, 3))
    link = optimizer._params().update_router.updaters[0].link
    assert isinstance(link, StreamLink)
    optimizer.zero_grad()
    loss = net(2)
    link.record_event().synchronize()
    hold_up(link, 10 * LATE)
    with link._h2d_stream:
        states = link.record_event()
    torch.autograd.backward(loss)
    link.record_event().synchronize()
    assert not states.query(), "backward waited for states"
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("end", ["resume", "close"])
def test_nothing_is_under_way_of_a_step_that_was_given_up(
    end: str, tmp_path: Path, device: torch.device
) -> None:
    """Updates beside backward write to weights, and to memory that goes with the optimizer."""
    net = Net(torch.bfloat16).to(device)
    optimizer = make(
        net, dir=tmp_path, commit_every=2, overlap="backward", update_on="device", states="ram"
    )
    train(net, optimizer, 0, 2)
    committed = [p.detach().clone() for p in net.parameters()]
    net.bring(range(2, 3))
    optimizer.zero_grad()
    loss = net(2)
    spin(device, 20 * LATE)
    torch.autograd.backward(loss)
    link = optimizer._params().update_router.updaters[0].link
    assert isinstance(link, StreamLink)
    with link.update_stream():
        last = link.record_event()
    assert not last.query()
    if end == "resume":
        assert optimizer.resume() == 2
        assert all(map(torch.equal, net.parameters(), committed))
    optimizer.close()
    assert last.query()


def test_what_makes_gradients_is_not_measured(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[tuple[SideTiming, SideTiming]] = []
    note = ShareTuner.note

    def seen(self: ShareTuner, host: SideTiming, there: SideTiming, *, commits: bool) -> None:
        if self.counts:
            noted.append((host, there))
        note(self, host, there, commits=commits)

    monkeypatch.setattr(ShareTuner, "note", seen)
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, states="ram", update_on="auto")
    for step in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(net(step))
        spin(device, 10 * LATE)
        optimizer.step()
    assert len(noted) == 2
    assert all(took.seconds < 10 * LATE for both in noted for took in both)
    optimizer.close()


def test_nothing_is_under_way_when_an_update_on_the_device_has_failed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, update_on="device")
    train(net, optimizer, 0, 1)
    params = optimizer._params()
    link = params.update_router.updaters[0].link
    assert isinstance(link, StreamLink)
    rules = params.update_router.updaters[0]._rules

    class Late:
        """A rule whose updates take long."""

        name = "late"

        def __init__(self, rule: UpdateRule) -> None:
            self.table_bytes, self._prepare = rule.table_bytes, rule.prepare

        def prepare(self, *given: Any) -> tuple[Pairs, Update]:  # noqa: ANN401  # as it was given
            tables, update = self._prepare(*given)

            def late(streams: Sequence[torch.Tensor]) -> None:
                spin(device, LATE)
                update(streams)

            return tables, late

    release = params.store.pipeline.caller_chunks.release

    def fails(chunk: int) -> None:
        if len(marks) > 1:  # several copies are under way
            raise KeyboardInterrupt
        release(chunk)

    params.update_router.updaters[0]._rules = {family: Late(rule) for family, rule in rules.items()}
    marks: list[DeviceEvent] = []
    monkeypatch.setattr(params.store.pipeline.caller_chunks, "release", fails)
    d2h = link.d2h
    monkeypatch.setattr(link, "d2h", lambda *given: marks.append(d2h(*given)) or marks[-1])
    torch.autograd.backward(net(1))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert len(marks) > 1
    assert all(mark.query() for mark in marks)


# --- weights of a stowed model on their way up ---


def units(
    link: StreamLink, *, ahead: int = 0, cast: bool = False, limit_bytes: int | None = None
) -> tuple[H2DPrefetcher, list[ShardStorage]]:
    """Return a prefetcher of units of one shard each, whose values are their numbers."""
    prefetcher = H2DPrefetcher(link, ahead=ahead, timing=IN_STEP, limit_bytes=limit_bytes)
    shards = []
    for number in range(4):
        block = PinnedBlock(4 * COUNT, link.device, link.synchronize)
        shards.append(ShardStorage(block.tensor(0, COUNT, torch.float32), COUNT, block))
        shards[-1].local_shard.fill_(number)
        prefetcher.add_unit(shards[-1:], [dtype_of(cast=cast)], None)
    return prefetcher, shards


def dtype_of(*, cast: bool) -> torch.dtype:
    return torch.bfloat16 if cast else torch.float32


def gathered(
    prefetcher: H2DPrefetcher, shard: ShardStorage, *, cast: bool = False, late: float = 0
) -> torch.Tensor:
    """Do what FSDP2 does; late: when the caller's stream comes to it."""
    weight = prefetcher.all_gather_input(shard, dtype_of(cast=cast))
    spin(weight.device, late)
    got = weight.clone()
    prefetcher.record_copied(shard)
    return got


def hold_up(link: StreamLink, seconds: float = LATE) -> DeviceEvent:
    """Let copies up be late; return a mark before them."""
    with link._h2d_stream:
        spin(link.device, seconds)
        return link.record_event()


@pytest.mark.parametrize("cast", [False, True])
def test_what_is_gathered_has_gone_up_before(link: StreamLink, *, cast: bool) -> None:
    """Its memory, on the device or pinned, is filled again when nobody uses it any more."""
    prefetcher, shards = units(link, cast=cast)
    hold_up(link)
    got = [gathered(prefetcher, shard, cast=cast, late=LATE / 4) for shard in shards]
    for number, one in enumerate(got):
        assert one.eq(number).all()


def test_a_copy_that_was_kept_gives_way_behind_its_reader(link: StreamLink) -> None:
    """A forward without a backward: the last unit's copy was kept for one."""
    prefetcher, shards = units(link)
    for number in (0, 1, 2, 3, 3, 2, 1, 0):
        gathered(prefetcher, shards[number])
    for number in (0, 1, 2):
        gathered(prefetcher, shards[number])
    last = gathered(prefetcher, shards[3], late=LATE)
    for shard in shards[:2]:  # FSDP2 gathers one ahead: both buffers are needed
        prefetcher.all_gather_input(shard, torch.float32)
    assert last.eq(3).all()


def test_copies_that_stay_are_waited_for_and_filled_again_behind_their_readers(
    link: StreamLink,
) -> None:
    prefetcher, shards = units(link, limit_bytes=1 << 20)
    assert prefetcher.cache is not None
    prefetcher.cache.assume(0)
    hold_up(link)
    for step in range(3):
        for number in (0, 1, 2, 3, 3, 2, 1, 0):
            assert gathered(prefetcher, shards[number], late=LATE / 8).eq(number + step).all()
        prefetcher.discard()
        for shard in shards:
            shard.local_shard.add_(1)
    prefetcher.cache.assume(1 << 20)
    prefetcher.buffers.free_own(list(prefetcher._units.values()))
    assert gathered(prefetcher, shards[0]).eq(3).all()


def test_buffers_are_made_of_memory_that_is_in_use_still(link: StreamLink) -> None:
    prefetcher, shards = units(link)
    used = [torch.ones(4 * COUNT, dtype=torch.uint8, device=link.device) for _ in range(2)]
    spin(link.device, LATE)
    for memory in used:
        memory.fill_(7)
    del memory, used
    assert gathered(prefetcher, shards[1]).eq(1).all()


@pytest.mark.parametrize("way", ["discard", "write"])
def test_host_memory_that_is_uploaded_changes_behind_that(way: str, link: StreamLink) -> None:
    prefetcher, shards = units(link)
    hold_up(link)
    weight = prefetcher.all_gather_input(shards[1], torch.float32)
    if way == "discard":
        prefetcher.discard()
    else:
        shards[1].discard_copies()
    shards[1].local_shard.fill_(9)
    assert weight.clone().eq(1).all()


@pytest.mark.usefixtures("device")
def test_whoever_reads_a_weight_in_host_memory_waits_for_its_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not only a module's forward, whose hooks wait by themselves."""
    plan = Plan(parameters="host", overlap="forward")
    model, optimizer = stow(layers(), partial(AdamW, lr=1e-2), plan=plan)
    waited: list[torch.Tensor] = []
    monkeypatch.setattr(AdamW, "wait", lambda _, parameters: waited.extend(parameters))
    for parameter in model.parameters():
        storage = storage_of(parameter)
        assert storage is not None
        with storage.access(write=False):
            assert waited.pop() is parameter
    monkeypatch.undo()
    optimizer.close()


def test_nothing_is_waited_for_to_go_ahead(link: StreamLink) -> None:
    prefetcher, shards = units(link, ahead=1, cast=True)
    for _ in range(2):
        for shard in shards:
            gathered(prefetcher, shard, cast=True)
    prefetcher.discard()
    link.synchronize()
    mark = hold_up(link, 5 * LATE)
    for shard in shards[:2]:
        gathered(prefetcher, shard, cast=True)
    assert not mark.query()


def test_what_is_gathered_on_another_stream_outlives_its_buffer(link: StreamLink) -> None:
    prefetcher, shards = units(link)
    gathered(prefetcher, shards[0])
    side = torch.Stream(link.device)
    with side:
        got = gathered(prefetcher, shards[1], late=LATE)
    del prefetcher, shards
    gc.collect()
    other = [torch.zeros(COUNT, device=link.device) for _ in range(2)]
    side.synchronize()
    assert got.eq(1).all()
    assert all(o.eq(0).all() for o in other)


# --- others who ask the device ---


def test_seconds_of_a_part_are_those_of_its_work_on_the_device(device: torch.device) -> None:
    timer = StepTimer(None, timed=True, logs=False)
    with timer.measure("forward"):
        spin(device, 2 * LATE)
    spin(device, 2 * LATE)
    with timer.measure("step"):
        pass
    assert timer._seconds["forward"] > LATE
    assert timer._seconds["step"] < LATE


def test_nothing_is_under_way_when_the_end_of_a_step_is_interrupted(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume would write to weights that are still copied."""
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, update_on="device")
    train(net, optimizer, 0, 1)
    (updater,) = optimizer._params().update_router.updaters
    marks: list[DeviceEvent] = []

    def interrupted(_: object = None) -> None:
        with updater.link.update_stream():
            spin(device, LATE)
            marks.append(updater.link.record_event())
        raise KeyboardInterrupt

    monkeypatch.setattr(updater, "wait", interrupted)
    torch.autograd.backward(net(1))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert all(mark.query() for mark in marks)
    assert marks
