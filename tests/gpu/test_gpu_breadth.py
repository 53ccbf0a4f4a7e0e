"""How many modules a gradient of an accelerator's parameter is handed to, plan by plan."""

from functools import partial

import pytest
import torch
from torch import nn

from handed import WIDTH, Parallel, modules_handed_a_gradient
from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.optim.stowed_adam import StowedAdam

STOWED = [
    # fp32_sums is one of them: sums in host memory and in fp32 are put aside by one class.
    (Plan(parameters="device", states="disk"), 10),
    (Plan(parameters="device", states="disk", overlap="forward"), 12),
    (Plan(parameters="device", states="disk", overlap="backward"), 9),
    (Plan(parameters="device", states="disk", update_on="device"), 9),
    (Plan(parameters="device", states="disk", update_on="hybrid"), 9),
    (Plan(parameters="device", states="disk", update_on="hybrid", overlap="backward"), 9),
    (Plan(parameters="host", states="disk"), 7),
    (Plan(parameters="host", states="disk", overlap="forward"), 7),
    (Plan(parameters="host", states="disk", overlap="backward"), 8),
    (Plan(parameters="disk", states="disk"), 8),
    (Plan(parameters="disk", states="disk", overlap="backward"), 8),
]
"""Plans, and how many modules a gradient is handed to at most.

On the device: its feed, and what the feeds of both sides share (``LinkFeed``).
"""
PLAIN = [
    ({}, 8),
    ({"overlap": "forward"}, 10),
    ({"overlap": "backward"}, 8),
    ({"update_on": "device"}, 9),
    ({"update_on": "device", "overlap": "backward"}, 9),
    ({"update_on": "hybrid"}, 9),
    ({"update_on": "hybrid", "overlap": "backward"}, 9),
]
"""Options of an optimizer over a model that is on the device."""


def settle(device: torch.device) -> None:
    torch.accelerator.synchronize(device)


@pytest.mark.parametrize(("plan", "most"), STOWED, ids=str)
def test_a_gradient_crosses_few_modules(plan: Plan, most: int, device: torch.device) -> None:
    def make() -> tuple[nn.Module, StowedAdam]:
        return stow(Parallel(), partial(AdamW, lr=1e-3), plan=plan)

    crossed = modules_handed_a_gradient(make, device, partial(settle, device))
    assert {"states/native_pipeline"} <= crossed
    assert len(crossed) <= most, sorted(crossed)


@pytest.mark.parametrize(("options", "most"), PLAIN, ids=str)
def test_a_gradient_crosses_few_modules_without_stow(
    options: dict[str, str], most: int, device: torch.device
) -> None:
    """A chunk for each weight: where two sides update, a gradient takes one way."""

    def make() -> tuple[nn.Module, StowedAdam]:
        model = Parallel().to(device)
        policy = PipelinePolicy(chunk_elements=WIDTH * WIDTH)
        named = {"states": "disk", "module": model, "policy": policy, **options}
        return model, AdamW(model.parameters(), lr=1e-3, **named)

    crossed = modules_handed_a_gradient(make, device, partial(settle, device))
    assert {"states/native_pipeline"} <= crossed
    assert len(crossed) <= most, sorted(crossed)


@pytest.mark.parametrize("overlap", ["none", "backward"])
def test_a_gradient_that_both_sides_use_goes_their_two_ways(
    overlap: str, device: torch.device
) -> None:
    """Two chunks for each weight: one piece goes to the host, one to the device's rule.

    What both ways have in common is met once, and each of them is as short as those above.
    """

    def make() -> tuple[nn.Module, StowedAdam]:
        model = Parallel().to(device)
        policy = PipelinePolicy(chunk_elements=WIDTH * WIDTH // 2)
        named = {"states": "disk", "module": model, "policy": policy, "overlap": overlap}
        return model, AdamW(model.parameters(), lr=1e-3, update_on=0.5, **named)

    crossed = modules_handed_a_gradient(make, device, partial(settle, device))
    host, there = {"io/device_link", "step/device_feed"}, {"step/device_updater"}
    assert host | there <= crossed
    assert len(crossed - host) <= 9, sorted(crossed)
    assert len(crossed) <= 11, sorted(crossed)
