"""Gradients on their way down: late copies are waited for; the unfrozen are hooked; buffers."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ranks.pool import Ranks
from remote import LateLink
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.gradient_hooks import Landing
from tensorstow.fsdp.gradients import HostGradient
from tensorstow.fsdp.sharding import move_buffers


def _sharded(values: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", [0])
    return nn.Parameter(DTensor.from_local(values, mesh, [Shard(0)]))


@torch.no_grad()
def _taken_down(seed: int) -> tuple[list[float], list[float], int, bool]:
    """Let two micro-batches' gradients fall over a link whose copies are late."""
    parameter = _sharded(torch.zeros(4, dtype=torch.bfloat16))
    link = LateLink(seed)
    landing = Landing([parameter], link)
    (hook,) = parameter._post_accumulate_grad_hooks.values()
    mesh, placements = parameter.device_mesh, parameter.placements
    first = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.bfloat16)
    parameter.grad = DTensor.from_local(first, mesh, placements)
    hook(parameter)
    local = parameter.grad.to_local()
    stands_in = isinstance(local, HostGradient)
    once = local.landed.tolist()
    local.more(torch.full((4,), 2.0**-9, dtype=torch.bfloat16))  # lost in a sum of bf16
    del landing
    return once, local.landed.tolist(), link.bytes_down, stands_in


@pytest.mark.parametrize("seed", range(3))
def test_a_late_gradient_is_waited_for_and_summed_in_fp32(ranks: "Ranks", seed: int) -> None:
    ((once, twice, moved, stands_in),) = ranks(1).run(_taken_down, seed)
    assert stands_in
    assert once == [1, 2, 3, 4]
    assert twice == [x + 2.0**-9 for x in once]
    assert moved == 2 * 8  # two bytes per element, of each


def _settled() -> list[bool]:
    """Tell whether the memory was let go of: with the landing, and before."""
    settled: list[bool] = []

    class DeviceLink(LateLink):
        def settle(self) -> None:
            settled.append(True)
            super().settle()

    landing = Landing([_sharded(torch.zeros(4))], DeviceLink())
    gc.collect()
    before = bool(settled)
    del landing
    gc.collect()
    return [before, bool(settled)]


def test_gradients_fall_into_memory_that_is_pinned_as_long_as_they_may(ranks: "Ranks") -> None:
    assert ranks(1).run(_settled) == [[False, True]]


def _thawed() -> list[bool]:
    """Watch a parameter that is frozen at first."""
    parameter = _sharded(torch.zeros(2))
    parameter.requires_grad = False
    landing = Landing([parameter])
    before = bool(parameter._post_accumulate_grad_hooks)
    parameter.requires_grad = True
    landing.hook()
    return [before, bool(parameter._post_accumulate_grad_hooks)]


def test_what_is_unfrozen_later_is_hooked_then(ranks: "Ranks") -> None:
    assert ranks(1).run(_thawed) == [[False, True]]


def _hooked() -> str:
    """Register a hook behind the sharding: the next forward says that it is not called."""
    parameter = _sharded(torch.zeros(2))
    landing = Landing([parameter])
    landing.hook()
    parameter.register_hook(lambda gradient: gradient)
    with pytest.raises(OptionError) as raised:
        landing.hook()
    return str(raised.value)


def test_a_hook_of_the_user_s_is_refused_by_the_next_forward(ranks: "Ranks") -> None:
    assert "has a hook (register_hook)" in ranks(1).run(_hooked)[0]


def test_buffers_with_values_move() -> None:
    module = nn.BatchNorm1d(2)
    module.register_buffer("empty", torch.empty(1, device="meta"))
    move_buffers(module, torch.device("cpu"))
    assert module.running_mean.is_cpu
    assert module.empty.is_meta
