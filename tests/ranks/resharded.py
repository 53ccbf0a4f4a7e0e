"""A run that goes on with other numbers of ranks: what tests call in each of them."""

import io
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tensorstow
from ranks.durable import SMALL, WIDTH, DurableRun, digest, patched
from ranks.twin import whole
from tensorstow.base.errors import CommitError
from tensorstow.cli.main import main
from tensorstow.store.remote import Remote
from tensorstow.store.store import Store

Facts = dict[str, str]


def whole_facts(model: nn.Module, optimizer: tensorstow.AdamW) -> Facts:
    """Return what all ranks together have of a run, by its bits."""
    optimizer.wait()
    facts = {name: digest(whole(value)) for name, value in model.state_dict().items()}
    for number, entry in optimizer.state_dict()["state"].items():
        facts |= {f"{number}.{name}": digest(whole(value)) for name, value in entry.items()}
    return facts


def go_on(
    directory: Path, steps: int, which: str | None, given: dict[str, Any]
) -> tuple[int | None, Facts, Facts]:
    """Resume, take ``steps``, commit; return where it began, and the facts then and at the end."""
    run = DurableRun(directory, commit_every=None, extra=lambda: {"step": run.step}, **given)
    start = run.resume(which)
    before = whole_facts(run.model, run.optimizer)
    assert run.optimizer.extra == ({} if start is None else {"step": start})
    run.train(run.step + steps)
    run.optimizer.commit()
    run.optimizer.wait()
    after = whole_facts(run.model, run.optimizer)
    run.optimizer.close()
    return start, before, after


def go_on_stowed(
    directory: Path, steps: int, plan: tensorstow.Plan, given: dict[str, Any]
) -> tuple[int | None, Facts, Facts]:
    """Do the same with a stowed model."""
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    make = partial(tensorstow.AdamW, lr=0.01, dir=directory, commit_every=None, **given)
    model, optimizer = tensorstow.stow(nn.Sequential(*blocks), make, plan=plan)
    start = optimizer.resume()
    before = whole_facts(model, optimizer)
    for step in range(start or 0, (start or 0) + steps):
        generator = torch.Generator().manual_seed(100 * dist.get_rank() + step)
        model(torch.randn(4, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.commit()
    after = whole_facts(model, optimizer)
    optimizer.close()
    return start, before, after


def told(
    directory: Path, which: str | int | None = None, given: dict[str, Any] | None = None
) -> str:
    """Return what a resume says to each rank, and that nothing of it is left to be waited for."""
    run = DurableRun(directory, commit_every=None, **(given or {}))
    try:
        run.resume(which)
    except tensorstow.StowError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        run.optimizer.close()
    return "nothing was raised"


def snapshot(directory: Path, name: str) -> Facts:
    """Make a snapshot, take a step more, and commit; return what the snapshot has."""
    run = DurableRun(directory, commit_every=None)
    run.resume()
    facts = whole_facts(run.model, run.optimizer)
    run.optimizer.snapshot(name)
    run.train(run.step + 1)
    run.optimizer.close()
    return facts


def push_while_live(directory: Path, url: str) -> Facts:
    """Push the newest commit by the command while the run commits more; return what it has."""
    run = DurableRun(directory, commit_every=None, extra=lambda: {"step": run.step})
    run.resume()
    run.train(2)
    run.optimizer.commit()
    facts = whole_facts(run.model, run.optimizer)
    put = Remote.put

    def put_while_others_commit(remote: Remote, name: str, data: bytes) -> None:
        if name.startswith("objects/") and run.step == 2:
            begun.set()
            assert go_on.wait(60)
        put(remote, name, data)

    begun, go_on = threading.Event(), threading.Event()
    command = ["run", "push", str(directory), url]
    with patched(Remote, "put", put_while_others_commit), ThreadPoolExecutor(1) as threads:
        dist.barrier()
        push = threads.submit(main, command) if dist.get_rank() == 0 else None
        if push is not None:
            assert begun.wait(60)
        dist.barrier()
        for _ in range(3):
            run.train(run.step + 1)
            run.optimizer.commit()
        go_on.set()
        assert push is None or push.result() == 0
    run.optimizer.close()
    return facts


def warnings_of_resume(directory: Path) -> str:
    """Return what a resume logs."""
    text = io.StringIO()
    handler, logger = logging.StreamHandler(text), logging.getLogger("tensorstow")
    run = DurableRun(directory, commit_every=None)
    logger.addHandler(handler)
    try:
        run.resume()
    finally:
        logger.removeHandler(handler)
        run.optimizer.close()
    return text.getvalue()


def fail_in_commit(directory: Path, rank: int) -> str:
    """Resume while the store of ``rank`` cannot commit; return what is raised."""

    def full(*_: object, **__: object) -> None:
        message = "no room"
        raise CommitError(message)

    with patched(Store, "commit", full if dist.get_rank() == rank else Store.commit):
        said = told(directory)
    dist.barrier()
    return said


def go_on_untrained(
    directory: Path, given: dict[str, Any], *, stand_still: bool = False
) -> tuple[int | None, Facts, Facts]:
    """Do what ``go_on`` does, with weights that no step updates in chunks of their own.

    ``stand_still``: steps update all weights, by nothing.
    """
    torch.manual_seed(2)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.ModuleList([nn.Linear(32, 32), nn.Linear(64, 128, bias=False)]).to(torch.bfloat16)
    for part in model:
        fully_shard(part, mesh=mesh)
    options: dict[str, Any] = {"states": "disk", "dir": directory, "commit_every": None, **given}
    optimizer = tensorstow.AdamW(model.parameters(), module=model, policy=SMALL, **options)
    start = optimizer.resume()
    before = whole_facts(model, optimizer)
    for _ in range(2):
        loss = model[0](torch.ones(1, 32, dtype=torch.bfloat16)).square().mean()
        if stand_still:
            optimizer.param_groups[0] |= {"lr": 0.0, "weight_decay": 0.0}
            loss = loss + model[1](torch.ones(1, 64, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.commit()
    after = whole_facts(model, optimizer)
    optimizer.close()
    return start, before, after


def go_on_tied(directory: Path, steps: int) -> tuple[int | None, Facts, Facts]:
    """Do what ``go_on`` does, with tied weights, groups, clipping and accumulation."""
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(33, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 33))
    model[2].weight = model[0].weight

    def make(named: Any, **options: Any) -> tensorstow.AdamW:  # noqa: ANN401  # as stow calls it
        params = dict(named)
        quick = {name: params.pop(name) for name in ("1.weight", "2.bias")}
        groups = [
            {"params": list(quick.items()), "lr": 0.02},
            {"params": list(params.items()), "weight_decay": 0.1},
        ]
        given: dict[str, Any] = {"dir": directory, "commit_every": None, "lr": 0.01, **options}
        return tensorstow.AdamW(groups, **given)

    plan = tensorstow.Plan(parameters="host", states="disk")
    model, optimizer = tensorstow.stow(model, make, plan=plan)
    start = optimizer.resume()
    before = whole_facts(model, optimizer)
    for step in range(start or 0, (start or 0) + steps):
        for part in range(2):
            generator = torch.Generator().manual_seed(100 * dist.get_rank() + 2 * step + part)
            tokens = torch.randint(33, (2, 5), generator=generator)
            (model(tokens).square().mean() / 2).backward()
        optimizer.clip_grad_norm_(0.01)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.commit()
    after = whole_facts(model, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == [0.02, 0.01]
    optimizer.close()
    return start, before, after


def go_on_over_files(
    directory: Path, weights: Path, change: float
) -> tuple[int | None, Facts, Facts] | str:
    """Do what ``go_on`` does, with frozen weights that stay in the user's files."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    for block in model:
        block[0].weight.requires_grad_(requires_grad=False)
    file = weights / "model.safetensors"
    if dist.get_rank() == 0:
        save_file({n: t.detach() + change for n, t in model.state_dict().items()}, file)
    dist.barrier()
    make = partial(tensorstow.AdamW, lr=0.01, dir=directory, commit_every=None)
    plan = tensorstow.Plan(parameters="disk", states="disk")
    model, optimizer = tensorstow.stow(model, make, plan=plan, weights=file)
    try:
        start = optimizer.resume()
        before = whole_facts(model, optimizer)
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.commit()
        return start, before, whole_facts(model, optimizer)
    except tensorstow.StowError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        optimizer.close()


def resume_twice(directory: Path) -> list[int | None]:
    """Resume, and resume again."""
    run = DurableRun(directory, commit_every=None)
    steps = [run.resume(), run.resume()]
    run.optimizer.close()
    return steps


def by_reference(directory: Path, reference: dict[str, Any] | None) -> tuple[dict[str, Any], Facts]:
    """Save a snapshot reference, or load one; return it, and what the run is."""
    run = DurableRun(directory, commit_every=None, checkpoints="reference")
    if reference is None:
        run.train(2)
        run.optimizer.snapshot("two")
        reference = run.optimizer.state_dict()
    else:
        run.optimizer.load_state_dict(reference)
    run.optimizer.wait()
    weights = {n: digest(whole(p)) for n, p in run.model.named_parameters()}
    run.optimizer.close()
    return reference, weights


def snapshot_to(directory: Path, url: str) -> Facts:
    """Take two steps, copy a snapshot elsewhere, and take another; return what it has."""
    run = DurableRun(directory, commit_every=None, extra=lambda: {"step": run.step})
    run.train(2)
    facts = whole_facts(run.model, run.optimizer)
    run.optimizer.snapshot("two", to=url)
    run.train(3)
    run.optimizer.commit()
    run.optimizer.close()
    return facts
