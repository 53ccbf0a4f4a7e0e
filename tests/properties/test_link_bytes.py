"""What crosses the link per bf16 parameter and step, counted with the CPU in the device's place."""

import sys

import pytest

from ranks.pool import Ranks
from tree import ROOT

sys.path.insert(0, str(ROOT))

from benchmarks.accelerator.link_bytes import RunConfig, counted

from tensorstow.base.tiers import Tier

OVERLAPS = ("none", "forward", "backward")


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("stowed", [True, False])
def test_gradients_go_down_once_and_weights_up_once(
    ranks: "Ranks", overlap: str, *, stowed: bool
) -> None:
    config = RunConfig(stowed=stowed, overlap=overlap)
    assert ranks(1).run(counted, config) == [(2.0, 2.0)]


@pytest.mark.parametrize("overlap", ["none", "forward"])
@pytest.mark.parametrize("stowed", [True, False])
def test_clipping_moves_no_gradient(ranks: "Ranks", overlap: str, *, stowed: bool) -> None:
    config = RunConfig(stowed=stowed, overlap=overlap, clip=0.1)
    assert ranks(1).run(counted, config) == [(2.0, 2.0)]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("stowed", [True, False])
def test_where_micro_batches_are_summed(ranks: "Ranks", overlap: str, *, stowed: bool) -> None:
    """On HOST by ``stow``, where each goes down; else on the device, and the sum goes down once.

    Of four in fp32 beside backward, alone in the dtype that autograd has.
    """
    down = 2.0 if not stowed else 4.0 if overlap == "backward" else 8.0
    config = RunConfig(stowed=stowed, overlap=overlap, micro_batches=4)
    assert ranks(1).run(counted, config) == [(down, 2.0)]


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_parameters_on_host_go_up_for_each_forward_and_backward(
    ranks: "Ranks", micro_batches: int, overlap: str
) -> None:
    config = RunConfig(Tier.HOST, overlap=overlap, micro_batches=micro_batches)
    assert ranks(1).run(counted, config) == [(2.0 * micro_batches, 4.0 * micro_batches)]
