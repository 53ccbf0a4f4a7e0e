"""Unsharded weights: resharded before they are old, trainable whatever the first forward was."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ranks.pool import Pool
from ranks.stowed import incomplete, loss_of, twins
from tensorstow import AdamW, Plan, stow
from tensorstow.base.errors import OptionError
from tensorstow.tensors.placeholder import ABORT_ADVICE
from torch_versions import RESETS_FSDP


def gathered(model: nn.Module) -> bool:
    """Return whether any parameter is whole."""
    return any(not isinstance(p, DTensor) for p in model.parameters())


def when_gathered(stage: int) -> list[bool]:
    """Return whether weights are gathered behind a look, a forward, a backward and a step."""
    # Beside backward FSDP2 has the weights at stage 2 too.
    both = twins(Plan(stage=stage, overlap="none" if stage == 3 else "backward"))
    found = []
    with torch.no_grad():
        loss_of(both.stowed, 0, 0)
    found.append(gathered(both.stowed))
    value = loss_of(both.stowed, 0, 0)
    found.append(gathered(both.stowed))
    value.backward()
    both.ours.step()
    found.append(gathered(both.stowed))
    both.ours.close()
    return found


@pytest.mark.parametrize(
    ("stage", "found"), [(3, [False, False, False]), (2, [False, True, False])]
)
def test_nothing_is_gathered_behind_a_look_or_a_step(
    ranks: Pool, stage: int, found: list[bool]
) -> None:
    assert ranks(2).run(when_gathered, stage) == [found] * 2


def looked_at_first(stage: int) -> None:
    """Look at the model under inference_mode before anything was trained."""
    both = twins(Plan(stage=stage))
    with torch.inference_mode():
        seen = [loss_of(model, both.rank, 0).item() for model in (both.stowed, both.alone)]
    assert seen[0] == seen[1]
    both.train()
    with torch.inference_mode():
        seen = [loss_of(model, both.rank, 0).item() for model in (both.stowed, both.alone)]
    assert seen[0] == seen[1]
    both.train(range(2, 3))
    both.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_first_forward_under_inference_mode_leaves_a_model_that_trains(
    ranks: Pool, stage: int
) -> None:
    ranks(2).run(looked_at_first, stage)


def frozen_at_first() -> None:
    """Train a unit that was all frozen at the first forward."""
    both = twins(Plan())
    for model in (both.stowed, both.alone):
        model.blocks[1].requires_grad_(requires_grad=False)
    both.train()
    both.compare()
    for model in (both.stowed, both.alone):
        model.blocks[1].requires_grad_(requires_grad=True)
    both.train(range(2, 4))
    assert both.stowed.blocks[1].up.weight in both.ours.state
    both.close()


def test_a_unit_that_is_unfrozen_later_is_trained(ranks: Pool) -> None:
    ranks(2).run(frozen_at_first)


class Breaks(torch.autograd.Function):
    """Ends a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        del ctx, gradient
        raise ValueError


@pytest.mark.parametrize("overlap", ["none", "backward"])
@RESETS_FSDP
def test_half_a_backward_stays_no_step(overlap: str) -> None:
    plan = Plan(parameters="disk", states="disk", overlap=overlap)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model, optimizer = stow(model, partial(AdamW, lr=1e-2), plan=plan)
    hook = model[1].register_forward_hook(lambda _, __, out: Breaks.apply(out))
    with pytest.raises(ValueError):  # noqa: PT011  # its own
        model(torch.ones(2, 4)).sum().backward()
    hook.remove()
    way_out = ABORT_ADVICE if overlap == "backward" else "call zero_grad()"
    for _ in range(2):  # neither of two calls sends to the other
        with pytest.raises(OptionError) as caught:
            optimizer.step()
        assert way_out.lower() in str(caught.value).lower()
        if overlap == "backward":
            with pytest.raises(OptionError, match=r"resume\(\)"):
                optimizer.zero_grad()
    if overlap == "none":
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.close()


def test_a_step_before_the_last_micro_batch_is_refused(ranks: Pool) -> None:
    for message in ranks(1).run(incomplete):
        assert "after 1 of accumulation_steps=2" in message
