"""Updates on the device: states go up and down at once, beside the update, through few chunks."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn
from training import Net, make, same_states, same_weights, temporaries, train

from parity.cover import crossed
from tensorstow import AdamW, PipelinePolicy
from tensorstow.base.update_on import UpdateOn
from tensorstow.formats.state_format import StateFormat
from tensorstow.io import device_link as links
from tensorstow.io.device_link import Pairs
from tensorstow.states import memory
from tensorstow.states.layout import parts_of
from tensorstow.states.memory import MOST_DEVICE_SLOTS
from tensorstow.step.update_rule import rule_on

COUNT = 10
"""Chunks of states."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Span = tuple[float, float]


def sized(device: torch.device) -> int:
    """Return a chunk's elements: a copy of its states outlasts the launches of its update."""
    return 1 << 14 if device.type == "simulated" else 1 << 22


def made(device: torch.device) -> tuple[list[nn.Parameter], AdamW]:
    size = sized(device)
    weights = [nn.Parameter(torch.ones(size, device=device)) for _ in range(COUNT)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.5)
    policy = PipelinePolicy(chunk_elements=size)
    return weights, AdamW(weights, lr=0.01, update_on="device", policy=policy)


def shared(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Return how long both were under way."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


@pytest.mark.parametrize("slots", [3, 1])
def test_states_go_up_while_others_come_down(
    slots: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one slot nothing can be under way beside another, which shows what is counted."""
    monkeypatch.setattr(memory, "MOST_DEVICE_SLOTS", slots)
    if device.type == "simulated":
        import simulated  # noqa: PLC0415  # registers the device

        simulated.set_delays(40e-3, 5e9, 0)  # longer than a host is kept from its work
    _, optimizer = made(device)
    link = optimizer._params().update_router.updaters[0].link
    assert isinstance(link, links.StreamLink)
    for _ in range(2):
        optimizer.step()
    copies: list[tuple[bool, torch.Event, torch.Event]] = []
    copy = links._copy

    def timed(pairs: Pairs, stream: torch.Stream) -> int:
        start, stop = (torch.Event(device, enable_timing=True) for _ in range(2))
        start.record(stream)
        nbytes = copy(pairs, stream)
        stop.record(stream)
        copies.append((stream is link._h2d_stream, start, stop))
        return nbytes

    monkeypatch.setattr(links, "_copy", timed)
    begin = torch.accelerator.current_stream(device).record_event(
        torch.Event(device, enable_timing=True)
    )
    optimizer.step()
    torch.accelerator.synchronize()
    if device.type == "simulated":
        simulated.set_delays(1e-3, 5e9, 0)
    up, down = (
        [(begin.elapsed_time(a), begin.elapsed_time(b)) for is_up, a, b in copies if is_up == way]
        for way in (True, False)
    )
    assert len(up) == len(down) == COUNT
    shorter = min(sum(b - a for a, b in way) for way in (up, down))
    if slots == 1:
        assert shared(up, down) < 0.05 * shorter
    else:
        assert shared(up, down) > 0.4 * shorter


ALL_FORMATS = [(dtype, kept, False) for dtype in DTYPES for kept in StateFormat]
MAXIMA = [(torch.float32, StateFormat.FP32, True), (torch.bfloat16, StateFormat.SPLIT, True)]


@pytest.mark.usefixtures("garbage_apart")
@pytest.mark.parametrize(
    ("dtype", "state_format", "amsgrad", "size"),
    [
        *((*case, 1 << 14) for case in [*ALL_FORMATS, *MAXIMA]),
        *((torch.bfloat16, kept, False, 3 << 18) for kept in StateFormat),
    ],
)
def test_a_step_holds_no_more_of_the_device_than_its_slots_and_one_update(
    dtype: torch.dtype,
    state_format: StateFormat,
    amsgrad: bool,  # noqa: FBT001
    size: int,
    device: torch.device,
) -> None:
    """However many chunks and parameters there are: 4 of one chunk each, and two in one."""
    sizes = [size] * 4 + [size // 2] * 2
    weights = [nn.Parameter(torch.ones(n, dtype=dtype, device=device)) for n in sizes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 0.5)
    optimizer = AdamW(
        weights,
        update_on="device",
        amsgrad=amsgrad,
        state_format=state_format,
        policy=PipelinePolicy(chunk_elements=size),
    )
    for _ in range(2):
        optimizer.step()
    chunks = optimizer._states().chunks
    assert len(chunks) == 5
    family = chunks[0].family
    choice = rule_on(device, family)
    states = parts_of(family, size)[-1].file_at
    held = optimizer._memory().device_bytes
    assert held == MOST_DEVICE_SLOTS * (states + choice.rule.table_bytes(2))
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated(device)
    torch.accelerator.reset_peak_memory_stats(device)
    optimizer.step()
    torch.accelerator.synchronize()
    peak = torch.accelerator.max_memory_allocated(device) - before
    assert torch.accelerator.memory_allocated(device) == before
    if not choice.why_not_fused:
        assert peak == 0  # all is in registers
    elif device.type == "simulated":
        assert peak == temporaries(family, size)
    else:  # blocks of other allocators are larger than what is asked for
        assert size <= peak <= 1.25 * temporaries(family, size) + (1 << 21)
    optimizer.close()


@crossed(
    states=("ram", "disk"), dtype=(torch.float32, torch.bfloat16), where=(0.4, "hybrid", "auto")
)
def test_updates_on_both_sides_have_the_bits_of_the_host(
    where: UpdateOn, dtype: torch.dtype, states: str, device: torch.device
) -> None:
    want, got = Net(dtype), Net(dtype).to(device)
    reference = make(want, states="ram")
    train(want, reference, 0, 6)
    optimizer = make(got, states=states, update_on=where)
    train(got, optimizer, 0, 6)
    assert same_weights(got, want)
    assert same_states(optimizer, reference)
    assert optimizer._params().update_router.share_tuner.is_final
    share = optimizer._traffic().device_share
    if where == "auto":
        assert share in {0.0, 1.0}
    elif where != "hybrid":
        assert share == pytest.approx(where, abs=0.1)
