"""States that are copied to a device and back; tests/gpu has an accelerator."""

import torch

from tensorstow.optim.generic.device_states import to_device, to_host


def test_tensors_with_dimensions_go_to_the_device_wherever_they_are_kept() -> None:
    entry = {"step": torch.ones(()), "sums": [torch.ones(2), (torch.ones(3, 3), 4)], "n": 5}
    moved, copies = to_device(entry, torch.device("meta"))
    assert moved["step"] is entry["step"]
    assert moved["n"] == 5
    first, (second, number) = moved["sums"]
    assert first.is_meta
    assert second.is_meta
    assert number == 4
    assert [copies[id(copy)][1].shape for copy in (first, second)] == [(2,), (3, 3)]


def test_what_is_in_host_memory_stays_as_it_is() -> None:
    parameter = torch.ones(2)
    entry = {"moment": torch.ones(2), "step": torch.ones(())}
    same, copies = to_device(entry, parameter.device)
    assert copies == {}
    assert same["moment"] is entry["moment"]
    back = to_host(same, parameter, copies)
    assert back["moment"] is entry["moment"]
    assert back["step"] is entry["step"]
