"""Memory that a stowed model gives back between steps: as measured, with the same bits after it."""

import ctypes
import gc
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstow
from ranks.pool import Pool, Ranks
from ranks.stowed import loss_of, model_of, twins
from ranks.twin import ADAMW, FETCHED, FETCHED_BESIDE, mesh_here
from tensorstow import Plan, named_weights
from tensorstow.base.errors import OptionError
from tensorstow.fsdp.stowed_parameter import storage_of

PLANS = [
    Plan(),
    Plan(overlap="backward"),
    Plan(overlap="forward", states="disk"),
    Plan(stage=2, overlap="forward"),
    Plan(parameter_units={"blocks.1": "disk"}, states="disk"),
    FETCHED,
    FETCHED_BESIDE,
    FETCHED.but(overlap="backward"),
]


def released_between(plan: Plan, host: bool) -> None:  # noqa: FBT001  # goes to another process
    """Give memory back after steps whose updates are still under way; hand weights over meanwhile.

    Nothing that computes runs until ``wake``, and all bits are those of a run without it.
    """
    both = twins(plan, torch.bfloat16)
    both.ours.release(host=host)  # before the first forward
    both.ours.wake()
    for step in range(3):
        both.train([step])
        both.ours.release(host=host)
        both.ours.release(host=host)
        received = dict(named_weights(both.stowed))
        wanted = dict(both.alone.named_parameters())
        assert all(torch.equal(received[name], wanted[name]) for name in wanted)
        for part in (both.stowed, *both.stowed.blocks):
            with pytest.raises(OptionError, match=r"A forward was called between optimizer\.rel"):
                part(torch.zeros(1, 1))
        for call in (both.ours.step, both.ours.state_dict, both.ours.grad_norm):
            with pytest.raises(OptionError, match=r"\(\) was called between optimizer\.release"):
                call()
        both.ours.zero_grad()
        both.ours.wake()
        both.ours.wake()
    both.train()
    both.compare()
    both.ours.release(host=host)
    both.close()  # closing needs no wake
    with torch.no_grad():
        assert torch.equal(loss_of(both.stowed, both.rank, 9), loss_of(both.alone, both.rank, 9))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("plan", PLANS, ids=[str(i) for i in range(len(PLANS))])
def test_training_goes_on_with_the_same_bits(ranks: Pool, plan: Plan, world: int) -> None:
    ranks(world).run(released_between, plan, plan.but(overlap="none") == FETCHED)


def refused_in_the_middle(plan: Plan) -> list[str]:
    """Return the errors after a backward, in a backward, and between micro-batches."""
    model, optimizer = tensorstow.stow(model_of(torch.float32), ADAMW, plan=plan, mesh=mesh_here())
    texts = []

    def expect_error(*_: object) -> None:
        with pytest.raises(OptionError) as raised:
            optimizer.release()
        texts.append(str(raised.value))

    value = loss_of(model, 0, 0)
    value.register_hook(expect_error)
    value.backward()
    expect_error()
    if plan.accumulation_steps > 1:
        loss_of(model, 0, 1).backward()
    optimizer.step()
    if next(iter(model.parameters())).grad is not None:
        expect_error()
    optimizer.zero_grad()
    optimizer.release()
    optimizer.close()
    return texts


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan(overlap="backward"), Plan(stage=1, accumulation_steps=2), FETCHED],
    ids=["none", "backward", "micro-batches", "disk"],
)
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_that_has_begun_is_ended_first(ranks: Pool, plan: Plan, world: int) -> None:
    for texts in ranks(world).run(refused_in_the_middle, plan):
        assert len(texts) >= 2
        assert "while backward runs" in texts[0]
        assert all("zero_grad()" in text for text in texts)


@pytest.mark.parametrize("plan", [Plan(), Plan(states="disk"), FETCHED], ids=str)
def test_a_backward_is_refused_too(plan: Plan) -> None:
    model, optimizer = tensorstow.stow(model_of(torch.float32), ADAMW, plan=plan)
    value = loss_of(model, 0, 0)
    optimizer.release()
    with pytest.raises(OptionError, match=r"A backward was called between optimizer\.release"):
        value.backward()
    optimizer.wake()
    optimizer.zero_grad()
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize(
    ("plan", "match"),
    [
        (Plan(), "of weights live in CPU memory|of optimizer states"),
        (Plan(parameters="disk", parameter_units={"blocks.1": "host"}, states="disk"), "CPU mem"),
        (Plan(parameters="disk"), "of optimizer states and copies"),
    ],
    ids=["host", "unit", "states"],
)
def test_what_stays_in_cpu_memory_is_named(plan: Plan, match: str) -> None:
    model, optimizer = tensorstow.stow(model_of(torch.float32), ADAMW, plan=plan)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(OptionError, match=match):
        optimizer.release(host=True)
    loss_of(model, 0, 0).backward()  # nothing was released
    optimizer.close()


def test_activations_that_wait_are_not_given_back(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)))
    plan = FETCHED.but(activations="disk")
    model, optimizer = tensorstow.stow(model, ADAMW, plan=plan, dir=tmp_path)
    value = model(torch.randn(4096, 256)).sum()
    with pytest.raises(OptionError, match="of activations wait for backward"):
        optimizer.release(host=True)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.release(host=True)
    optimizer.close()


def test_a_commit_follows_wake(tmp_path: Path) -> None:
    adamw = partial(ADAMW, commit_every=None)
    model, optimizer = tensorstow.stow(model_of(torch.float32), adamw, plan=FETCHED, dir=tmp_path)
    loss_of(model, 0, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.release(host=True)
    with pytest.raises(OptionError, match=r"commit\(\) was called between"):
        optimizer.commit()
    assert list(optimizer.snapshots()) == []
    weights = dict(named_weights(model))
    optimizer.wake()
    assert optimizer.commit() == 1
    optimizer.close()
    again, optimizer = tensorstow.stow(model_of(torch.float32), adamw, plan=FETCHED, dir=tmp_path)
    assert optimizer.resume() == 1
    assert all(torch.equal(weights[n], t) for n, t in named_weights(again))
    optimizer.close()


WIDE, DEEP = 1024, 24
"""A model of 96 MiB, with states of 192 MiB."""


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) << 12


def resident_bytes() -> list[int]:
    """Return resident memory: trained, released, after a hand-over, and awake after a step."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(DEEP)))
    plan = FETCHED.but(weight_ram_budget="64MiB")
    model, optimizer = tensorstow.stow(model, ADAMW, plan=plan, mesh=mesh_here())
    row = torch.randn(2, WIDE)
    storage = storage_of(next(model.parameters()))
    assert storage is not None
    assert storage.pager is not None
    bound = storage.pager.pool.memory.capacity

    def step() -> int:
        model(row).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        return _resident()

    step()
    seen = [step()]
    optimizer.release(host=True)
    seen.append(_resident())
    assert sum(t.nbytes for _, t in named_weights(model)) == 4 * DEEP * WIDE * WIDE
    seen.append(_resident())
    optimizer.wake()
    assert storage.pager.pool.memory.capacity == bound == 64 << 20
    seen.append(step())
    optimizer.close()
    return seen


def test_host_memory_is_given_back() -> None:
    """A pool of 64 MiB of weights, a ring of 44, and 100 of freed tensors that are kept.

    A hand-over takes a unit of weights again.
    """
    pool = Ranks(1)
    try:
        ((trained, released, handed, awake),) = pool.run(resident_bytes)
    finally:
        pool.close()
    assert trained - released > 180 << 20, (trained, released)
    assert handed - released < 24 << 20, (released, handed)
    assert awake - released > 180 << 20, (released, awake)
