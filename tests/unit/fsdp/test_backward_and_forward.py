"""Updates that begin in backward and are left at its end: the next forward waits for each."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compare import all_equal
from parity.beside import slow
from tensorstow import AdamW, PipelinePolicy, Plan, stow
from tensorstow.base.errors import OptionError, PoisonedError
from tensorstow.step.unpublished import Unpublished

WIDTH = 64
BLOCKS = 8
CHUNK = WIDTH * WIDTH
BACKWARD = Plan(parameters="host", states="disk", overlap="backward", ram_budget="144KiB")
"""A ring of two slots."""


class Blocks(nn.Module):
    """Blocks of a chunk each; ``seen`` has what was not new yet when each had its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.tanh(block(x))
            self.seen.append(awaited(self))
        return x


def awaited(model: nn.Module) -> int:
    return sum(issubclass(type(p), Unpublished) for p in model.parameters())


def made(plan: Plan = BACKWARD, **given: Any) -> tuple[Any, Any]:  # noqa: ANN401
    policy = PipelinePolicy(chunk_elements=CHUNK, backend="threads", depth=1)
    return stow(Blocks(), partial(AdamW, lr=1e-2, policy=policy, **given), plan=plan)


def train(model: Any, optimizer: Any, steps: range) -> None:  # noqa: ANN401
    for step in steps:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_the_next_forward_waits_for_what_is_left_block_by_block() -> None:
    want, alone = made(BACKWARD.but(overlap="none"))
    train(want, alone, range(4))
    model, optimizer = made()
    train(model, optimizer, range(2))
    slow(optimizer)
    train(model, optimizer, range(2, 3))
    assert awaited(model) > 2
    model.seen.clear()
    train(model, optimizer, range(3, 4))
    assert model.seen[0] > 0
    assert model.seen == sorted(model.seen, reverse=True)
    assert model.seen[-1] == 0
    assert all_equal(weights(model), weights(want))
    optimizer.close()
    alone.close()


def test_what_forward_needs_first_is_updated_before_what_has_waited_longer() -> None:
    model, optimizer = made()
    train(model, optimizer, range(2))
    slow(optimizer)
    optimizer.start_trace()
    train(model, optimizer, range(2, 3))
    optimizer.synchronize()
    updates = [event.chunk for event in optimizer.trace() if event.lane == "update"]
    params = optimizer._params()
    blocks = [n for k in updates for n in params.store.chunks[k].owners]  # one each, in order
    assert sorted(blocks) == [*range(BLOCKS)]
    # The last blocks' states were being read when their gradients came. Of the others, whose
    # gradients came in the same order, the newest is next. (A slow backward finds more being read.)
    assert [block for block in blocks if block < BLOCKS // 2] == [*range(BLOCKS // 2)]
    optimizer.close()


@pytest.mark.parametrize("way", ["commit", "disk", "plain"])
def test_others_are_new_when_step_returns(way: str, tmp_path: Path) -> None:
    """Steps that commit, weights on disk, and models that ``stow`` did not place."""
    if way == "plain":
        model: Any = Blocks()
        policy = PipelinePolicy(chunk_elements=CHUNK, backend="threads", depth=1)
        optimizer: Any = AdamW(
            model.parameters(), states="disk", overlap="backward", module=model, policy=policy
        )
    elif way == "disk":
        model, optimizer = made(BACKWARD.but(parameters="disk"))
    else:
        model, optimizer = made(dir=tmp_path, commit_every=1)
    train(model, optimizer, range(2))
    slow(optimizer)
    train(model, optimizer, range(2, 3))
    assert awaited(model) == 0
    optimizer.close()


def test_gradients_that_are_read_still_are_not_given_to_others() -> None:
    """Their memory is held until the updates that read it are over."""
    model, optimizer = made()
    train(model, optimizer, range(2))
    slow(optimizer)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    model(x).square().mean().backward()
    optimizer.step()
    held = optimizer._runtime.schedule.held
    assert len(held) >= awaited(model) > 2
    optimizer.wait()
    assert optimizer._runtime.schedule.held == []
    optimizer.close()


def test_gradients_in_a_buffer_of_the_users_are_used_before_step_returns() -> None:
    """Backward takes the user's buffer itself where nothing was computed from it."""

    def trained(plan: Plan) -> list[Tensor]:
        model, optimizer = made(plan)
        train(model, optimizer, range(2))
        slow(optimizer)
        flat = torch.zeros(sum(p.numel() for p in model.parameters()))
        parts = flat.split([p.numel() for p in model.parameters()])
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter.grad = part.view(parameter.shape)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        flat.fill_(torch.nan)
        optimizer.close()
        return weights(model)

    assert all_equal(trained(BACKWARD), trained(BACKWARD.but(overlap="none")))


def test_a_gradient_that_is_changed_while_an_update_reads_it_is_told() -> None:
    """Autograd adds to it without an operation that could wait."""
    model, optimizer = made()
    train(model, optimizer, range(2))
    slow(optimizer)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(2))
    model(x).square().mean().backward()
    optimizer.step()
    for update in optimizer._runtime.schedule._under_way.values():
        torch.autograd.graph.increment_version([update.update.gradient])
    with pytest.raises(OptionError, match="changed in place after step"):
        model(x)
    optimizer.close()


@pytest.mark.parametrize(
    "plan", [BACKWARD, BACKWARD.but(parameters="disk", overlap="forward")], ids=["host", "disk"]
)
def test_an_error_behind_step_is_raised_by_each_forward(plan: Plan) -> None:
    model, optimizer = made(plan)
    train(model, optimizer, range(2))
    engine = optimizer._states().engine
    assert engine is not None
    optimizer.synchronize()
    engine.inject_fault("read", times=-1, delay_us=500_000, error=5)
    train(model, optimizer, range(2, 3))
    with pytest.raises(OSError, match=r"[Ii]nput/output error"):
        train(model, optimizer, range(3, 4))
    for _ in range(2):
        with pytest.raises(PoisonedError):
            train(model, optimizer, range(3, 4))
    optimizer.close()
