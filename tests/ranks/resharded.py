"""A run that goes on with other numbers of ranks: what tests call in each of them."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import tensorstow
from ranks.durable import WIDTH, DurableRun, digest, patched
from tensorstow.base.errors import CommitError
from tensorstow.store.store import Store

Facts = dict[str, str]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements on all ranks together."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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


def told(directory: Path, which: str | None = None, given: dict[str, Any] | None = None) -> str:
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


def fail_in_commit(directory: Path, rank: int) -> str:
    """Resume while the store of ``rank`` cannot commit; return what is raised."""

    def full(*_: object, **__: object) -> None:
        message = "no room"
        raise CommitError(message)

    with patched(Store, "commit", full if dist.get_rank() == rank else Store.commit):
        said = told(directory)
    dist.barrier()
    return said
