"""Weights on disk, updated beside the next forward: what runs when, and with how many reads."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstow
from compare import all_equal
from ranks.stowed import groups_of
from tensorstow import PipelinePolicy, Plan
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.report import parameter_bytes
from tensorstow.step.unpublished import Unpublished

WIDTH = 64
BLOCKS = 8
UNIT = -(-4 * WIDTH * (WIDTH + 1) // 4096) * 4096
ROOM = 3 * (UNIT + 4096)
"""The least that is taken."""
FORWARD = Plan(parameters="disk", states="disk", overlap="forward", prefetch=1)


class Blocks(nn.Module):
    """Blocks of one size; ``seen`` has what was not new yet when each began."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.seen: list[int] = []
        self.stop_before = BLOCKS

    def forward(self, x: torch.Tensor, *, blocks: int = BLOCKS) -> torch.Tensor:
        for number, block in enumerate(self.blocks[:blocks]):
            if number == self.stop_before:
                message = "a forward that fails"
                raise ValueError(message)
            x = x + torch.tanh(block(x))
            self.seen.append(awaited(self))
        return x


def awaited(model: nn.Module) -> int:
    """Return how many of the model's weights are not new yet."""
    return sum(issubclass(type(p), Unpublished) for p in model.parameters())


def updated(optimizer: Any) -> int:  # noqa: ANN401
    """Return how many weights the pipeline has updated, whether anybody waited or not."""
    params = optimizer._params()
    return sum(params.store.pipeline.is_published(p.number) for p in params.all())


def stowed(plan: Plan = FORWARD, **options: Any) -> tuple[Any, Any]:  # noqa: ANN401
    policy = PipelinePolicy(chunk_elements=2048)
    return tensorstow.stow(Blocks(), partial(groups_of, policy=policy, **options), plan=plan)


def backward(model: nn.Module, step: int, **options: Any) -> None:  # noqa: ANN401
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
    model(x, **options).square().mean().backward()


def take(model: nn.Module, optimizer: Any, step: int, *, clips: bool = False, **given: Any) -> None:  # noqa: ANN401
    backward(model, step, **given)
    if clips:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()


def trained(plan: Plan, steps: int = 4) -> list[torch.Tensor]:
    model, optimizer = stowed(plan)
    for step in range(steps):
        take(model, optimizer, step, clips=True)
    return ended(model, optimizer)


def ended(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:  # noqa: ANN401
    optimizer.wait()
    weights = [p.full_tensor().clone() for p in model.parameters()]
    optimizer.close()
    return weights


def test_a_step_ends_in_the_next_forward() -> None:
    model, optimizer = stowed()
    for step in range(3):
        take(model, optimizer, step)
    assert awaited(model) == 2 * BLOCKS
    model.seen.clear()
    backward(model, 3)
    assert model.seen == [2 * (BLOCKS - 1 - n) for n in range(BLOCKS)]
    assert awaited(model) == 0
    assert not [p for p in optimizer._params().all() if p.pager.pins]
    optimizer.close()


def test_a_forward_finds_updated_weights_in_memory() -> None:
    """A step reads each weight twice, for forward and for backward, as without an update."""
    found = {}
    for overlap in ("none", "forward"):
        plan = FORWARD.but(overlap=overlap, weight_ram_budget=4 * UNIT)
        model, optimizer = stowed(plan)
        counts = []
        for step in range(4):
            take(model, optimizer, step)
            optimizer.wait()  # updates read units too
            counts.append(parameter_bytes(model).bytes_read)
        found[overlap] = counts[-1] - counts[-2]
        assert parameter_bytes(model).most_buffer_pool_bytes <= 4 * UNIT
        optimizer.close()
    assert found["forward"] <= 2 * BLOCKS * UNIT
    assert found["none"] > found["forward"]


def test_a_forward_of_some_blocks_leaves_the_rest_to_the_next_step() -> None:
    results = []
    for overlap in ("none", "forward"):
        model, optimizer = stowed(FORWARD.but(overlap=overlap))
        for step, blocks in enumerate((8, 3, 8, 1, 5, 8)):
            take(model, optimizer, step, blocks=blocks)
        results.append(ended(model, optimizer))
    assert all_equal(*results)


def test_pins_of_updates_leave_room_in_backward() -> None:
    """Updates of units that forward left out are under way while backward pins the others."""
    plan = FORWARD.but(weight_ram_budget=ROOM, prefetch=0)
    model, optimizer = stowed(plan)
    for step, blocks in enumerate((8, 2, 8, 2, 8, 2)):
        take(model, optimizer, step, blocks=blocks)
    assert parameter_bytes(model).most_buffer_pool_bytes <= ROOM
    optimizer.close()


def test_a_read_of_a_weight_that_is_new_lets_the_updates_of_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else their pins would stay, beside those of a backward."""
    model, optimizer = stowed()
    backward(model, 0)
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, WIDTH), blocks=1)
    path = optimizer._params().update_router.step_path
    waits: list[Any] = []
    monkeypatch.setattr(path, "wait", waits.append)
    optimizer.wait([model.blocks[0].weight])
    assert waits == [()]
    monkeypatch.undo()
    optimizer.wait()
    monkeypatch.setattr(path, "wait", waits.append)
    optimizer.wait([model.blocks[0].weight])
    assert waits == [()]  # nothing is under way
    monkeypatch.undo()
    optimizer.close()


def test_training_goes_on_behind_a_forward_that_failed_between_updates() -> None:
    results = []
    for overlap in ("none", "forward"):
        model, optimizer = stowed(FORWARD.but(overlap=overlap))
        for step in range(5):
            if step == 2:
                model.stop_before = 3
                with pytest.raises(ValueError, match="fails"):
                    backward(model, step)
                model.stop_before = BLOCKS
                optimizer.zero_grad()
            take(model, optimizer, step)
        results.append(ended(model, optimizer))
    assert all_equal(*results)


def test_weights_can_be_read_and_written_between_steps() -> None:
    results = []
    for overlap in ("none", "forward"):
        model, optimizer = stowed(FORWARD.but(overlap=overlap))
        looks = []
        for step in range(4):
            take(model, optimizer, step)
            looks.append(model.blocks[5].weight.full_tensor().clone())  # out of order
            with torch.no_grad():
                model.blocks[6].bias.mul_(0.5)
            looks += [value.clone() for value in model.state_dict().values()]
        results.append(looks + ended(model, optimizer))
    assert all_equal(*results)


def test_a_step_that_commits_waits_for_its_updates_and_can_be_resumed(tmp_path: Path) -> None:
    want = trained(FORWARD.but(overlap="none"), 5)
    for until in (3, 5):
        model, optimizer = stowed(dir=tmp_path / "run", commit_every=2)
        start = optimizer.resume() or 0
        assert start == (0 if until == 3 else 3)  # close() commits
        for step in range(start, until):
            take(model, optimizer, step, clips=True)
            # Nobody passes on the rest for the thread that commits: the pipeline alone ends it.
            end = time.monotonic() + 30
            while (step + 1) % 2 == 0 and updated(optimizer) < 2 * BLOCKS:
                assert time.monotonic() < end
                time.sleep(0.001)
        if until == 3:
            optimizer.close()
    assert all_equal(ended(model, optimizer), want)


def test_a_run_that_is_closed_at_once_has_ended_its_last_step(tmp_path: Path) -> None:
    want = trained(FORWARD.but(overlap="none"), 3)
    model, optimizer = stowed(dir=tmp_path / "run")
    for step in range(3):
        take(model, optimizer, step, clips=True)
    optimizer.commit()
    optimizer.close()
    model, optimizer = stowed(dir=tmp_path / "run")
    assert optimizer.resume() == 3
    assert all_equal(ended(model, optimizer), want)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "zero_grad": lambda model: model.zero_grad(set_to_none=False),
    "zero_": lambda model: [p.grad.zero_() for p in model.parameters()],
    "to_local": lambda model: [p.grad.to_local().zero_() for p in model.parameters()],
    "foreach": lambda model: torch._foreach_mul_([p.grad for p in model.parameters()], 0.5),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("tier", ["disk", "host"])
def test_a_gradient_that_is_written_before_its_update_is_an_error(how: str, tier: str) -> None:
    """It would be used as it is now: the step would be another one."""
    plan = FORWARD.but(parameters=tier)
    make = partial(groups_of, policy=PipelinePolicy(chunk_elements=2048))
    dtype = torch.bfloat16 if tier == "host" else None  # else it would not be sharded
    model, optimizer = tensorstow.stow(Blocks(), make, plan=plan, compute_dtype=dtype)
    backward(model, 0)
    optimizer.step()
    with optimizer.updated():
        WRITES[how](model)
    model.zero_grad()
    backward(model, 1)
    optimizer.step()
    WRITES[how](model)
    with pytest.raises(OptionError, match="A gradient was changed in place after step"):
        optimizer.wait()
    optimizer.close()


@pytest.mark.parametrize("how", ["data", "detach", "to_local"])
def test_a_weight_is_read_and_written_through_an_alias_from_before_the_step(how: str) -> None:
    results = []
    for overlap in ("none", "forward"):
        model, optimizer = stowed(FORWARD.but(overlap=overlap))
        weight = model.blocks[5].weight
        alias = weight.data if how == "data" else getattr(weight, how)()
        take(model, optimizer, 0)
        with torch.no_grad():
            seen = alias.sum()
            alias.mul_(0.5)
        backward(model, 1)
        optimizer.step()
        whole = seen.full_tensor() if isinstance(seen, DTensor) else seen
        results.append([whole.detach().clone(), *ended(model, optimizer)])
    assert all_equal(*results)


def test_other_threads_read_weights_beside_training() -> None:
    want = trained(FORWARD.but(overlap="none"), 20)
    model, optimizer = stowed()
    sharded = list(model.parameters())  # a module has whole ones while it computes
    over, errors = threading.Event(), []

    def read() -> None:
        try:
            while not over.is_set():
                for parameter in sharded:
                    parameter.full_tensor()
        except BaseException as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for step in range(20):
        take(model, optimizer, step, clips=True)
    over.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert all_equal(ended(model, optimizer), want)


@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_weights_on_disk_are_not_made_nan(overlap: str) -> None:
    results = []
    for nan in (False, True):
        policy = PipelinePolicy(chunk_elements=2048, nan_until_published=nan)
        model, optimizer = tensorstow.stow(
            Blocks(), partial(groups_of, policy=policy), plan=FORWARD.but(overlap=overlap)
        )
        for step in range(3):
            take(model, optimizer, step)
        results.append(ended(model, optimizer))
    assert all_equal(*results)
