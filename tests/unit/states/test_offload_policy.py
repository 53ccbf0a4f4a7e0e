from pathlib import Path

import pytest
import torch

from tensorstow.formats.state_format import StateFormat
from tensorstow.states.layout import OptionalStates
from tensorstow.states.offload_policy import OffloadPolicy
from tensorstow.states.state_store import Placement

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WHERE = (Path(),)
MOMENTS = OptionalStates(amsgrad=False)


@pytest.mark.parametrize(
    ("fraction", "durable", "moving"),
    [(0.0, False, False), (0.1, False, True), (1.0, False, True), (0.0, True, True)],
)
def test_what_moves(fraction: float, durable: bool, moving: bool) -> None:  # noqa: FBT001
    offload_policy = OffloadPolicy(Placement(fraction, WHERE, None, durable))
    assert offload_policy.moving == moving
    best = StateFormat.SPLIT if moving else StateFormat.FP32
    assert offload_policy.family(BF16, MOMENTS).format == best
    assert offload_policy.family(FP32, OptionalStates(amsgrad=True)).format == StateFormat.FP32


def test_where_updates_run_changes_no_format() -> None:
    for fraction in (0.0, 1.0):
        host, there = (
            OffloadPolicy(Placement(fraction, WHERE, None), update_on=u) for u in (None, "device")
        )
        for dtype in (FP32, FP16, BF16):
            assert host.family(dtype, MOMENTS) == there.family(dtype, MOMENTS)


def test_masters_that_are_averaged_are_whole() -> None:
    averaged = OptionalStates(amsgrad=False, ema=True)
    for fraction in (0.0, 1.0):
        offload_policy = OffloadPolicy(Placement(fraction, WHERE, None))
        for dtype in (FP32, FP16, BF16):
            assert offload_policy.family(dtype, averaged).format == StateFormat.FP32


@pytest.mark.parametrize("wanted", StateFormat)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_a_format_that_is_asked_for_is_used_where_it_can_be(
    wanted: StateFormat, dtype: torch.dtype
) -> None:
    offload_policy = OffloadPolicy(Placement(1.0, WHERE, None), format=wanted)
    only_bf16 = wanted == StateFormat.SPLIT and dtype != BF16
    expected = StateFormat.FP32 if only_bf16 else wanted
    assert offload_policy.family(dtype, MOMENTS).format == expected
