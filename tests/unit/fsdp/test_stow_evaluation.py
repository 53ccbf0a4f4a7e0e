"""Forwards without gradients between training steps: newest weights, and nothing spoilt by them."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from ranks.pool import Pool
from ranks.stowed import loss_of, twins
from ranks.twin import FETCHED, FETCHED_BESIDE, whole
from tensorstow import Plan

PLANS = [
    Plan(),
    Plan(overlap="forward"),
    Plan(overlap="backward"),
    Plan(overlap="backward", states="disk", parameters="disk"),
    *(Plan(stage=stage, overlap="forward") for stage in (0, 1, 2)),
    Plan(parameters="device"),
    FETCHED,
    FETCHED_BESIDE,
]
MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def generated(model: nn.Module, mode: str) -> Sequence[int]:
    """Return tokens, each of them made of those before."""
    model.eval()
    tokens = torch.tensor([[1]])
    with MODES[mode]():
        for _ in range(3):
            tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
        tokens = torch.cat([tokens, (model(tokens).double().sum() * 1e9).long().view(1, 1)], 1)
    model.train()
    return tokens.flatten().tolist()


def evaluated(plan: Plan, mode: str) -> None:
    """Look at the model before the first step, between backward and step, and behind the last."""
    both = twins(plan)
    looks = []
    for step in range(2):
        looks.append(both.each(lambda model, _: generated(model, mode)))
        both.backward(step)
        if plan.overlap != "backward":  # whose updates have begun
            looks.append(both.each(lambda model, _: generated(model, mode)))
        both.step()
    looks.append(both.each(lambda model, _: generated(model, mode)))
    assert all(ours == theirs for ours, theirs in looks)
    assert len({tuple(theirs) for _, theirs in looks}) == 3
    both.close()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(
    ("plan", "mode"),
    [
        *((plan, "inference_mode") for plan in PLANS),
        (Plan(), "no_grad"),
        (Plan(stage=2), "no_grad"),
    ],
    ids=lambda p: p if isinstance(p, str) else f"z{p.stage}-{p.overlap}-{p.parameters}-{p.states}",
)
def test_evaluation_between_steps_sees_the_newest_weights(
    ranks: Pool, plan: Plan, mode: str, world: int
) -> None:
    ranks(world).run(evaluated, plan, mode)


def clipped_behind_a_look(stage: int) -> None:
    both = twins(Plan(stage=stage))
    both.backward(0)
    both.each(lambda model, _: generated(model, "no_grad"))
    norm = whole(nn.utils.clip_grad_norm_(both.stowed.parameters(), 0.05))
    assert norm is not None
    nn.utils.clip_grads_with_norm_(both.alone.parameters(), 0.05, norm)
    assert norm > 0.05
    both.compare_gradients()
    both.step()
    both.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_models_parameters_are_the_trained_ones_behind_an_evaluation(
    ranks: Pool, stage: int
) -> None:
    ranks(2).run(clipped_behind_a_look, stage)


def looked_at_with_gradients(stage: int) -> None:
    """Let weights be gathered while they are updated: a forward whose backward never comes."""
    both = twins(Plan(stage=stage))
    for step in range(2):
        both.backward(step)
        both.each(lambda model, _: loss_of(model, 0, 9))
        both.step()
    both.backward(2)
    both.step()
    both.close()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathered_weights_do_not_outlive_an_update(ranks: Pool, stage: int) -> None:
    ranks(2).run(looked_at_with_gradients, stage)
