"""What is counted: waits of the host, bytes over the link, and the device's memory."""

import gc
from collections.abc import Sequence
from functools import partial
from types import ModuleType

import pytest
import torch
from torch import nn
from training import Net, make, spin, temporaries, train

from tensorstow import AdamW, Plan, stow
from tensorstow.base.tiers import Tier
from tensorstow.base.update_on import Overlap
from tensorstow.deepspeed import checkpointing
from tensorstow.fsdp import gradient_offload
from tensorstow.fsdp.h2d_prefetch import h2d_prefetcher_of
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.io.device_link import Pairs
from tensorstow.states.layout import Family
from tensorstow.step import device_updater
from tensorstow.step.segment_update import SegmentUpdate, Update
from tensorstow.step.update_rule import Choice, TorchRule, rule_on

OVERLAPS = ("none", "forward", "backward")
LATE = 1.0
"""Seconds; longer than a busy machine keeps the host from its next line."""
pytestmark = pytest.mark.usefixtures("garbage_apart")
"""What a finalizer waits for is no wait of the test's that it runs in."""


@pytest.fixture
def simulated(device: torch.device) -> ModuleType:
    """Return the package of the simulated accelerator, which counts."""
    if device.type != "simulated":
        pytest.skip("the simulated accelerator alone counts")
    import simulated  # noqa: PLC0415  # registers the device

    return simulated


def test_activations_that_are_kept_in_host_memory_hold_no_backward_up(
    simulated: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator's state, for which every stream is waited for, is not asked for here."""
    without = partial(checkpointing.torch_checkpoint, preserve_rng_state=False)
    monkeypatch.setattr(checkpointing, "torch_checkpoint", without)
    layer = nn.Linear(64, 64).to(device)
    x = torch.ones(256, 64, device=device, requires_grad=True)
    checkpointing.configure(checkpoint_in_cpu=True)
    simulated.take_counts()
    try:
        loss = checkpointing.checkpoint(layer, x).sum()
        moved = simulated.take_counts()
        loss.backward()
        assert moved["bytes_down"] == x.nbytes
        assert simulated.take_counts()["host_waits"] == 0
    finally:
        checkpointing.reset()


@pytest.mark.parametrize(
    ("overlap", "update_on"),
    [
        *((o, "host") for o in OVERLAPS),
        *((o, u) for o in ("none", "backward") for u in ("device", 0.5)),
    ],
)
def test_forward_and_backward_do_not_wait_for_the_device(
    overlap: str, update_on: str | float, simulated: ModuleType, device: torch.device
) -> None:
    """And the bytes of each step are those that the optimizer says."""
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, overlap=overlap, update_on=update_on)
    train(net, optimizer, 0, 2)
    for step in range(2, 5):
        optimizer.zero_grad()
        net.bring(range(step, step + 1))
        before = optimizer._traffic()
        simulated.take_counts()
        torch.autograd.backward(net(step))
        counts = simulated.take_counts()
        assert counts["host_waits"] == 0
        optimizer.step()
        optimizer.wait()
        moved, after = simulated.take_counts(), optimizer._traffic()
        for way in ("bytes_down", "bytes_up"):
            told = getattr(after, way) - getattr(before, way)
            assert counts[way] + moved[way] == told
    optimizer.close()


class Tabled:
    """A rule that sends a table up with each chunk, as the fused kernel does."""

    name = "with tables"

    def table_bytes(self, segments: int) -> int:
        return 128 * segments

    def prepare(
        self,
        segments: Sequence[SegmentUpdate],
        family: Family,
        here: torch.Tensor,
        there: torch.Tensor,
    ) -> tuple[Pairs, Update]:
        return [(there, here)], TorchRule().prepare(segments, family, here, there)[1]


def test_a_rule_s_tables_hold_no_backward_up(
    simulated: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_updater, "rule_on", lambda *_: Choice(Tabled()))
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, overlap="backward", update_on="device", states="ram")
    train(net, optimizer, 0, 2)
    went_up = 0
    for step in range(2, 6):  # in a short backward a chunk may not be ready before it ends
        net.bring(range(step, step + 1))
        optimizer.zero_grad()
        simulated.take_counts()
        torch.autograd.backward(net(step))
        counts = simulated.take_counts()
        went_up += counts["bytes_up"]
        assert counts["host_waits"] == 0
        optimizer.step()
        optimizer.wait()
    assert went_up > 0
    optimizer.close()


def test_a_forward_waits_for_gradients_that_are_late_and_for_nothing_else(
    simulated: ModuleType, device: torch.device
) -> None:
    """The host updates the weights, so it has to wait until their gradients are down, by chunk."""
    net = Net(torch.bfloat16).to(device)
    optimizer = make(net, overlap="forward")
    train(net, optimizer, 0, 2)
    net.bring(range(2, 4))
    simulated.take_counts()
    torch.autograd.backward(net(2))
    spin(device, LATE)
    optimizer.step()
    assert simulated.take_counts()["host_waits"] == 0
    loss = net(3)
    chunks = len(optimizer._states().chunks)
    assert 0 < simulated.take_counts()["host_waits"] <= chunks
    torch.autograd.backward(loss)
    assert simulated.take_counts()["host_waits"] == 0
    optimizer.step()
    optimizer.close()


# --- stowed models ---

WIDTH = 256
LAYERS = 6
WEIGHT = WIDTH * WIDTH * 2
PLANS = [
    Plan(parameters="device"),
    Plan(parameters="device", overlap="forward"),
    Plan(parameters="device", overlap="backward"),
    Plan(parameters="device", update_on="device"),
    Plan(parameters="device", update_on="device", overlap="backward"),
    Plan(parameters="host"),
    Plan(parameters="host", overlap="backward"),
    Plan(parameters="host", micro_batches=4),
    Plan(parameters="host", micro_batches=4, overlap="backward"),
    Plan(parameters="disk", states="disk"),
]


def stowed(plan: Plan) -> tuple[nn.Module, AdamW]:
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
    return stow(nn.Sequential(*layers).bfloat16(), partial(AdamW, lr=1e-3), plan=plan)


def link_bytes(model: nn.Module, optimizer: AdamW) -> tuple[int, int]:
    """Return what optimizer and model say went down and up."""
    states, weights = optimizer._traffic(), parameter_bytes(model)
    return states.bytes_down + weights.link_bytes_down, states.bytes_up + weights.link_bytes_up


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_bytes_of_a_stowed_model_are_those_that_it_says(
    plan: Plan, simulated: ModuleType, device: torch.device
) -> None:
    model, optimizer = stowed(plan)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=device)
    for step in range(3):
        optimizer.zero_grad()
        told = link_bytes(model, optimizer)
        simulated.take_counts()
        model(x).float().sum().backward()
        optimizer.step()
        optimizer.wait()
        counts = simulated.take_counts()
        now = link_bytes(model, optimizer)
        if step > 0:  # weights go down before the first step
            moved = (counts["bytes_down"], counts["bytes_up"])
            assert moved == (now[0] - told[0], now[1] - told[1])
    optimizer.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_micro_batches_in_units_share_one_copy_of_a_weight_and_one_of_its_gradient(
    tier: Tier, simulated: ModuleType, device: torch.device
) -> None:
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=device)
    moved = {}
    for count in (1, 4):
        # Beside a forward it depends on time how much of the next one is copied ahead at the end.
        plan = Plan(parameters=tier, micro_batches=count, overlap="none")
        model, optimizer = stowed(plan)
        for size in (2, 3) if count == 1 else ():  # the other looks at the model so
            with torch.no_grad():
                model(x[:size])
        for step in range(5):
            if step == 1:
                simulated.take_counts()
            model(x).float().sum().backward()
            optimizer.step()
            optimizer.wait()
            optimizer.zero_grad()
        moved[count] = simulated.take_counts()
        optimizer.close()
    assert moved[4]["bytes_up"] == moved[1]["bytes_up"]
    assert moved[1]["bytes_down"] == 4 * LAYERS * WEIGHT
    assert moved[4]["bytes_down"] == 2 * moved[1]["bytes_down"]  # once, in fp32


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("plan", PLANS[:-1], ids=str)
def test_forward_and_backward_of_a_stowed_model_do_not_wait_for_the_device(
    plan: Plan, micro_batches: int, simulated: ModuleType, device: torch.device
) -> None:
    """But where updates run beside the forward: for late gradients, once a chunk."""
    plan = plan.but(accumulation_steps=micro_batches)
    model, optimizer = stowed(plan)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=device)
    for step in range(3):
        optimizer.zero_grad()
        beside = plan.overlap in {"forward", "backward"}  # of which the rest is in forward
        late = len(optimizer._params().store.chunks) if beside else 0
        for _ in range(micro_batches):
            simulated.take_counts()
            loss = model(x).float().sum()
            assert step == 0 or simulated.take_counts()["host_waits"] <= late
            loss.backward()
            assert step == 0 or simulated.take_counts()["host_waits"] == 0
            late = 0
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_the_host_waits_once_for_each_copy_of_weights_on_disk_and_for_nothing_else(
    overlap: Overlap, micro_batches: int, simulated: ModuleType, device: torch.device
) -> None:
    """They pass through pinned memory, which the host fills again: behind the copy it was in.

    Where the link keeps up that copy is over, and the wait is short; from the second step on all of
    the pinned memory has been used.
    """
    plan = Plan(parameters="disk", overlap=overlap, accumulation_steps=micro_batches)
    model, optimizer = stowed(plan)
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=device)
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            simulated.take_counts()
            loss = model(x).float().sum()
            forward = simulated.take_counts()
            loss.backward()
            for counts in (forward, simulated.take_counts()):
                assert step == 0 or counts["host_waits"] == counts["bytes_up"] // WEIGHT
        optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("pieces", [1, 4])
def test_backward_waits_where_the_device_holds_too_many_gradients(
    pieces: int, simulated: ModuleType, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until there is buffer for the next, which a piece or some make."""
    monkeypatch.setattr(gradient_offload, "MAX_IN_FLIGHT_BYTES", WEIGHT)
    monkeypatch.setattr(gradient_offload, "PIECE_BYTES", WEIGHT // pieces)
    model, optimizer = stowed(Plan(parameters="host", accumulation_steps=2))
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, device=device)
    model(x).float().sum().backward()
    torch.accelerator.synchronize()
    loss = model(x).float().sum()
    spin(device, LATE)
    simulated.take_counts()
    loss.backward()
    assert 0 < simulated.take_counts()["host_waits"] <= (LAYERS - 1) * pieces
    optimizer.step()
    optimizer.close()


# --- the device's memory ---

ROWS = 4
ACTIVATIONS = (LAYERS + 2) * ROWS * WIDTH * 4
"""Inputs of layers, the last one's output in both dtypes, and gradients of two of them: at most."""


def most_held(plan: Plan, device: torch.device) -> tuple[int, int]:
    """Return the most that steps hold on the device by the end of backward, and its slots.

    Those that states pass through, what torch's operations hold that update a chunk beside
    backward, and those that weights on HOST or DISK go up into.
    """
    torch.accelerator.synchronize()
    x = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16, device=device)
    gc.collect()  # what an earlier test left goes now, and not in between
    before, most = torch.accelerator.memory_allocated(), 0
    model, optimizer = stowed(plan)
    for _ in range(4):
        torch.accelerator.reset_peak_memory_stats()
        model(x).float().sum().backward()
        most = max(most, torch.accelerator.max_memory_allocated() - before)
        optimizer.step()
        optimizer.zero_grad()
    prefetcher = h2d_prefetcher_of(model)
    buffers = 0 if prefetcher is None else prefetcher.buffers.device_bytes
    slots = optimizer._memory().device_bytes + buffers
    if plan.update_on == "device" and plan.overlap == "backward":
        chunks = optimizer._states().chunks
        if rule_on(device, chunks[0].family).why_not_fused:
            slots += max(int(temporaries(c.family, c.plan.elements)) for c in chunks)
    optimizer.close()
    return most, slots


@pytest.mark.parametrize("under_way", [2 * WEIGHT, 1 << 30])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_the_device_holds_weights_and_gradients_on_their_way(
    overlap: str, under_way: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the bound are one that is being copied, and one that backward makes."""
    monkeypatch.setattr(gradient_offload, "MAX_IN_FLIGHT_BYTES", under_way)
    most, slots = most_held(Plan(parameters="device", overlap=overlap), device)
    gradients = min(LAYERS * WEIGHT, under_way + 2 * WEIGHT)
    assert slots == 0
    assert LAYERS * WEIGHT < most <= LAYERS * WEIGHT + gradients + ACTIVATIONS


@pytest.mark.parametrize(
    "plan",
    [
        Plan(parameters="device", overlap="backward"),
        Plan(parameters="device", update_on="device"),
        Plan(parameters="device", update_on="device", overlap="backward"),
    ],
    ids=str,
)
def test_the_device_holds_weights_gradients_and_slots_of_states(
    plan: Plan, device: torch.device
) -> None:
    most, slots = most_held(plan, device)
    assert (slots > 0) == (plan.update_on == "device")
    assert most <= 2 * LAYERS * WEIGHT + slots + ACTIVATIONS


@pytest.mark.parametrize("parameters", ["host", "disk"])
@pytest.mark.parametrize("under_way", [WEIGHT, 1 << 30])
def test_the_device_holds_two_gathered_units_where_parameters_are_elsewhere(
    parameters: str, under_way: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a gradient before it is reduced, and those on their way."""
    monkeypatch.setattr(gradient_offload, "MAX_IN_FLIGHT_BYTES", under_way)
    most, slots = most_held(Plan(parameters=parameters), device)  # type: ignore[arg-type]  # text
    gradients = min(LAYERS * WEIGHT, under_way + 2 * WEIGHT)
    assert slots + 2 * WEIGHT < most <= slots + 3 * WEIGHT + gradients + ACTIVATIONS
