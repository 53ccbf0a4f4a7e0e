"""``overlap="speculative"`` in a run that commits: what is undone was never in a commit."""

import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parity.beside import ALWAYS, NEVER, PLAIN, SCHEDULES, blocks, same, states_of, weights
from parity.cover import crossed
from ranks.pool import Ranks
from tensorstow import AdamW, Plan, named_weights, stow, usage


def backward(model: nn.Module, step: int) -> None:
    """Run a backward; in each third step the first two blocks, and their chunks, have none."""
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(dtype)
    left_out = [] if step % 3 < 2 else list(model.parameters())[:4]
    for param in left_out:
        param.requires_grad = False
    torch.autograd.backward(model(x).float().square().mean())
    for param in left_out:
        param.requires_grad = True


def train(
    optimizer: AdamW, model: nn.Module, norms: Sequence[float], first: int = 0
) -> list[dict[str, Tensor]]:
    """Return the weights after each step."""
    after = []
    for step, most in enumerate(norms[first:], start=first):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.clip_grad_norm_(most)
        optimizer.step()
        optimizer.wait()
        after.append(weights(model) if optimizer._params().all()[0].pager is None else {})
    return after


def committing(model: nn.Module, directory: Path, **given: Any) -> AdamW:  # noqa: ANN401
    given = {"states": "disk", "commit_every": 1, **given}
    return AdamW(
        model.parameters(),
        lr=1e-2,
        dir=directory,
        overlap="speculative",
        module=model,
        policy=PLAIN,
        **given,
    )


def wait_for_updates(optimizer: AdamW, model: nn.Module) -> None:
    """Wait for the updates of backward, and for what they write."""
    pipeline, chunks = optimizer._states().pipeline, optimizer._states().chunks
    pipeline.wait_parameters([optimizer._params().get(p).number for p in model.parameters()])
    while any(pipeline.stored.state(chunk) == "writing" for chunk in chunks):
        time.sleep(1e-3)


def resumed(directory: Path, copy: Path, dtype: torch.dtype, **given: Any) -> tuple[Any, ...]:  # noqa: ANN401
    """Return what a copy of the run goes on from: as after the loss of its process."""
    shutil.copytree(directory, copy)
    model = blocks().to(dtype)
    optimizer = committing(model, copy, **given)
    step = optimizer.resume()
    return step, model, optimizer


@crossed(
    norms=tuple(SCHEDULES),
    dtype=(torch.float32, torch.bfloat16),
    every=(1, 2, 3, None),
    states=("disk", 0.5),
)
def test_bits_and_commits_are_those_without_overlap(
    norms: str, dtype: torch.dtype, every: int | None, states: str | float, tmp_path: Path
) -> None:
    limits = SCHEDULES[norms]
    model = blocks().to(dtype)
    plain = AdamW(model.parameters(), lr=1e-2)
    want = train(plain, model, limits)
    given = {"commit_every": every, "states": states}
    for lost in (1, 4, 6):
        run, other = tmp_path / f"run{lost}", blocks().to(dtype)
        optimizer = committing(other, run, **given)
        assert all(map(same, train(optimizer, other, limits[:lost]), want))
        if every is None and lost > 2:
            optimizer.commit()
        optimizer.synchronize()
        optimizer.zero_grad()
        backward(other, lost)  # the open step is lost
        step, other, optimizer = resumed(run, tmp_path / f"copy{lost}", dtype, **given)
        assert (step or 0) == (lost - lost % every if every else lost if lost > 2 else 0)
        assert step is None or same(weights(other), want[step - 1])
        assert all(map(same, train(optimizer, other, limits, step or 0), want[step or 0 :]))
        assert all(map(torch.equal, states_of(optimizer), states_of(plain)))
        optimizer.close()


def on_disk(directory: Path, dtype: torch.dtype, every: int | None) -> tuple[nn.Module, AdamW]:
    """Return a model whose weights are on disk too."""
    model, optimizer = stow(
        blocks().to(dtype),
        AdamW,
        lr=1e-2,
        dir=directory,
        commit_every=every,
        plan=Plan(states="disk", parameters="disk", overlap="speculative"),
        policy=PLAIN,
    )
    assert isinstance(optimizer, AdamW)
    return model, optimizer


@crossed(
    norms=tuple(SCHEDULES),
    dtype=(torch.float32, torch.bfloat16),
    every=(1, 2, 3, None),
)
def test_weights_on_disk_have_the_bits_and_commits_without_overlap(
    norms: str, dtype: torch.dtype, every: int | None, tmp_path: Path
) -> None:
    limits = SCHEDULES[norms]
    model = blocks().to(dtype)
    want = train(AdamW(model.parameters(), lr=1e-2), model, limits)
    for lost in (1, 4, 6):
        run = tmp_path / f"run{lost}"
        other, optimizer = on_disk(run, dtype, every)
        train(optimizer, other, limits[:lost])
        assert same(dict(named_weights(other)), want[lost - 1])
        if every is None and lost > 2:
            optimizer.commit()
        optimizer.synchronize()
        optimizer.zero_grad()
        backward(other, lost)  # the open step is lost
        shutil.copytree(run, tmp_path / f"copy{lost}")
        other, optimizer = on_disk(tmp_path / f"copy{lost}", dtype, every)
        step = optimizer.resume() or 0
        assert step == (lost - lost % every if every else lost if lost > 2 else 0)
        assert step == 0 or same(dict(named_weights(other)), want[step - 1])
        train(optimizer, other, limits, step)
        assert same(dict(named_weights(other)), want[-1])
        optimizer.close()


def test_a_step_that_was_undone_still_commits_as_requested(tmp_path: Path) -> None:
    model = blocks()
    optimizer = committing(model, tmp_path, commit_every=None)
    train(optimizer, model, [NEVER])
    optimizer.request_commit()
    optimizer.zero_grad()
    backward(model, 8)
    optimizer.zero_grad()
    assert optimizer._runtime.commits.committed is None
    train(optimizer, model, [NEVER, NEVER], 1)
    assert optimizer._runtime.commits.committed == 2
    train(optimizer, model, [NEVER] * 3, 2)  # and the next one does not
    assert optimizer._runtime.commits.committed == 2
    optimizer.close()


def test_a_step_that_overflows_leaves_the_commit_requested(tmp_path: Path) -> None:
    model = blocks()
    optimizer = committing(model, tmp_path, commit_every=None)
    train(optimizer, model, [NEVER])
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer.zero_grad()
    optimizer.request_commit()
    torch.autograd.backward(scaler.scale(model(torch.ones(8, 32)).sum() * torch.inf))
    scaler.step(optimizer)
    scaler.update()
    optimizer.synchronize()
    # A rank alone commits at once: between two steps.
    assert optimizer._runtime.commits.committed == 2
    assert not optimizer._runtime.commits.is_requested
    optimizer.close()


def test_close_commits_what_was_requested_of_a_step_that_it_undoes(tmp_path: Path) -> None:
    model = blocks()
    optimizer = committing(model, tmp_path / "run", commit_every=None)
    (want,) = train(optimizer, model, [NEVER])
    optimizer.request_commit()
    optimizer.zero_grad()
    backward(model, 8)
    optimizer.close()
    step, model, optimizer = resumed(tmp_path / "run", tmp_path / "copy", torch.float32)
    assert (step, same(weights(model), want)) == (1, True)
    optimizer.close()


def close_after_a_request(run: Path) -> int | None:
    """Let rank 0 request a commit, drop the step that decides about it, and close."""
    plan = Plan(states="disk", overlap="speculative")
    make = partial(AdamW, lr=1e-2, commit_every=None, policy=PLAIN)
    model, optimizer = stow(blocks(), make, plan=plan, dir=run)
    assert isinstance(optimizer, AdamW)
    train(optimizer, model, [NEVER])
    if dist.get_rank() == 0:
        optimizer.request_commit()
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.zero_grad()
    optimizer.close()
    return optimizer._runtime.commits.committed


def read_on_one_rank(run: Path | None) -> dict[str, Tensor]:
    """Let rank 0 alone read weights between backward and ``step()``."""
    plan = Plan(states="disk", overlap="none" if run is None else "speculative")
    durable: dict[str, Any] = {} if run is None else {"commit_every": 2}
    make = partial(AdamW, lr=1e-2, policy=PLAIN, **durable)
    model, optimizer = stow(blocks(), make, plan=plan, dir=run)
    assert isinstance(optimizer, AdamW)
    for step in range(6):
        optimizer.zero_grad()
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        torch.autograd.backward(model(x).square().mean())
        optimizer.clip_grad_norm_(NEVER if step % 2 else ALWAYS)
        if dist.get_rank() == 0 and step in {1, 3}:
            optimizer.wait()  # as a read of a weight does
            assert not optimizer._runtime.schedule.is_open
        optimizer.step()
    optimizer.wait()
    after = dict(named_weights(model))
    optimizer.close()
    return after


def test_what_one_rank_reads_leaves_the_others_alone(ranks: Ranks, tmp_path: Path) -> None:
    want = ranks(2).run(read_on_one_rank, None)
    got = ranks(2).run(read_on_one_rank, tmp_path / "run")
    assert all(map(same, got, want))


def test_all_ranks_answer_a_request_when_they_close(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    assert ranks(2).run(close_after_a_request, tmp_path / "run") == [1, 1]


def test_a_request_outlives_a_resume_that_drops_its_step(tmp_path: Path) -> None:
    model = blocks()
    optimizer = committing(model, tmp_path, commit_every=None)
    want = train(optimizer, model, [NEVER] * 4)
    optimizer.commit()
    train(optimizer, model, [NEVER] * 6, 4)
    optimizer.request_commit()
    optimizer.zero_grad()
    backward(model, 6)
    assert optimizer.resume() == 4
    assert same(weights(model), want[-1])
    train(optimizer, model, [NEVER] * 7, 4)
    assert optimizer._runtime.commits.committed == 5
    backups = optimizer._runtime.schedule._old_weights.memory  # type: ignore[attr-defined]
    held = {id(memory) for memory in optimizer._states().pipeline.memory}
    assert len(backups) == 6
    assert held >= {id(backup) for backup in backups.values()}
    optimizer.close()


def test_a_resume_without_a_commit_drops_an_open_step_and_its_gradients(tmp_path: Path) -> None:
    model = blocks()
    optimizer = committing(model, tmp_path, commit_every=None)
    before = weights(model)
    backward(model, 0)
    wait_for_updates(optimizer, model)
    assert optimizer.resume() is None
    assert all(p.grad is None for p in model.parameters())
    assert same(weights(model), before)
    optimizer.close()


@pytest.mark.parametrize("end", ["commit", "snapshot", "close", "commit_to", "another step"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_an_undone_commit_has_written_is_in_no_later_one(
    dtype: torch.dtype, end: str, tmp_path: Path
) -> None:
    model, run = blocks().to(dtype), tmp_path / "run"
    optimizer = committing(model, run, commit_every=1)
    want = train(optimizer, model, [NEVER] * 2)[-1]
    optimizer.zero_grad()
    backward(model, 3)  # of all parameters, and the step would commit
    wait_for_updates(optimizer, model)
    optimizer.zero_grad()
    if end == "another step":
        want = train(optimizer, model, [NEVER] * 3, 2)[-1]  # the first chunks have no gradient
    elif end == "commit_to":
        run = tmp_path / "elsewhere"
        optimizer.commit_to(run, extra={})
    elif end == "snapshot":
        optimizer.snapshot("one", extra={})
    elif end == "commit":
        optimizer.commit(extra={})
    optimizer.close()
    step, model, optimizer = resumed(run, tmp_path / "copy", dtype)
    assert (step, same(weights(model), want)) == (3 if end == "another step" else 2, True)
    optimizer.close()


def test_old_weights_are_those_of_the_parameters_of_now(tmp_path: Path) -> None:
    """Also where others, of another size, have come in their place."""
    model = blocks()
    optimizer = AdamW(
        model.parameters(),
        lr=1e-2,
        states="disk",
        dir=tmp_path,
        durability="none",
        overlap="speculative",
        policy=PLAIN,
    )
    train(optimizer, model, [NEVER, ALWAYS])
    larger, plain = blocks(64), blocks(64)
    optimizer.param_groups[0]["params"] = list(larger.parameters())
    optimizer.state.clear()
    reference = AdamW(plain.parameters(), lr=1e-2)
    for net, each in ((larger, optimizer), (plain, reference)):
        for step, most in enumerate([NEVER, ALWAYS, NEVER]):
            each.zero_grad()
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            torch.autograd.backward(net(x).square().mean())
            each.clip_grad_norm_(most)
            each.step()
        each.wait()
    assert same(weights(larger), weights(plain))
    optimizer.close()


def test_a_chunk_has_three_places(tmp_path: Path) -> None:
    model = blocks()
    optimizer = committing(model, tmp_path, commit_every=2)
    stored, places = optimizer._states().pipeline.stored, []
    for step in range(12):
        train(optimizer, model, [NEVER if step % 5 else ALWAYS] * (step + 1), step)
        optimizer.synchronize()
        places += [stored.place(chunk) for chunk in optimizer._states().chunks]
    chunks = optimizer._states().chunks
    assert len(set(places)) <= 3 * len(chunks)
    assert usage(optimizer=optimizer).states.file_bytes == 2 * sum(c.file_bytes for c in chunks)
    optimizer.close()


@pytest.mark.parametrize("at", ["begun", "undone", "taken again"])
def test_a_lost_process_goes_on_from_its_commit(at: str, tmp_path: Path) -> None:
    """Whatever an open step has written."""
    model, run = blocks(), tmp_path / "run"
    optimizer = committing(model, run)
    want = train(optimizer, model, [NEVER] * 3)[-1]
    optimizer.synchronize()
    optimizer.zero_grad()
    backward(model, 3)
    wait_for_updates(optimizer, model)
    if at == "undone":
        optimizer.zero_grad()
    elif at == "taken again":
        optimizer.clip_grad_norm_(ALWAYS)
        optimizer.step()
        optimizer.synchronize()
        (want,) = [weights(model)]
    step, model, other = resumed(run, tmp_path / "copy", torch.float32)
    assert (step, same(weights(model), want)) == (4 if at == "taken again" else 3, True)
    other.close()
    optimizer.zero_grad()
    optimizer.close()
