"""Modules that are created on a device, in a dtype."""

import pytest
import torch

import tensorstow.deepspeed as deepspeed


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("enabled", [True, False])
def test_modules_are_created_where_and_as_it_is_said(device: str, *, enabled: bool) -> None:
    with deepspeed.OnDevice(dtype=torch.half, device=device, enabled=enabled):
        made = torch.nn.Linear(2, 3)
    want = (device, torch.half) if enabled else ("cpu", torch.float32)
    assert {(str(p.device), p.dtype) for p in made.parameters()} == {want}
    assert torch.empty(1).dtype == torch.float32
    assert torch.empty(1).device.type == "cpu"
