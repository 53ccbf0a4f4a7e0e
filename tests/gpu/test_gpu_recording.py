import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow
from tensorstow import Plan, Tier
from tensorstow.io.device_link import open_link
from tensorstow.io.transfer_log import TransferLog


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_copies_over_the_link_are_lanes_with_all_their_bytes(
    tier: Tier, device: torch.device, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    plan = Plan(parameters=tier, states=Tier.HOST)
    model, optimizer = tensorstow.stow(model, partial(tensorstow.AdamW, lr=1e-3), plan=plan)

    def step() -> None:
        model(torch.randn(4, 64, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with optimizer.recording():
        for _ in range(2):
            step()
    files = optimizer.report(tmp_path)
    events = json.loads(files["trace"].read_text())["traceEvents"]
    figures = json.loads(files["figures"].read_text())
    for lane, moved in (
        ("link down", "from the accelerator"),
        ("link up", "to the accelerator"),
    ):
        copies = [e for e in events if e.get("cat") == lane and e["ph"] == "b"]
        assert sum(e["args"].get("bytes", 0) for e in copies) == figures["moved"][moved] > 0
    assert figures["peak_bytes"]["device"] > 0
    optimizer.close()


def test_copies_are_timed_by_the_clock_of_the_device(device: torch.device) -> None:
    if device.type != "simulated":
        pytest.skip("the simulated accelerator can be made busy")
    import simulated  # noqa: PLC0415  # registers the device, which others than it must not

    link, log = open_link(device), TransferLog()
    early = link.second_link()
    there = torch.zeros(1 << 16, device=device)
    here = torch.ones(1 << 16).pin_memory()
    simulated.busy(0.3)  # the clocks are compared behind it
    link.start_log(log)
    submitted = time.monotonic()
    for each in (link, early, link.second_link(), link):
        up = each.h2d([(there, here)])
        each.d2h([(here, there)], [up]).synchronize()
    with link._h2d_stream:
        simulated.busy(0.1)
    link.h2d([(there, here)])  # which is under way when the log ends
    link.end_log()
    over = time.monotonic()
    assert [copy.nbytes for copy in log.transfers] == 9 * [here.nbytes]
    assert sorted(copy.lane for copy in log.transfers) == 4 * ["link down"] + 5 * ["link up"]
    for copy in log.transfers:
        assert submitted - 0.1 < copy.start < copy.stop < over + 0.1
